"use strict";

// What all pages share. Every text from the data becomes a text node, never markup.

const data = JSON.parse(document.getElementById("data").textContent);
/** Return a text by its number among the words of the page. */
const word = (number) => (number === null ? null : data.words[number]);
const byId = (id) => document.getElementById(id);

/** Make an element. A property that is undefined is left out; children are elements or texts. */
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined) continue;
    if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Call a function once for the next frame, however often it was requested. */
function onNextFrame(act) {
  let requested = 0;
  return () => {
    requested ||= requestAnimationFrame(() => {
      requested = 0;
      act();
    });
  };
}

const clamp = (value, least, most) => Math.max(least, Math.min(value, most));

/** Return the value of a colour of the style in the scheme of the browser, as a canvas reads it. */
function colour(name) {
  const probe = document.body.appendChild(element("i"));
  probe.style.color = `var(${name})`;
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

const sum = (items, value) => items.reduce((total, item) => total + value(item), 0);
/** Return whether a key belongs to the browser. */
const isShortcut = (event) => event.ctrlKey || event.altKey || event.metaKey;

/** Call a function now, and when the browser changes between light and dark. */
function onScheme(act) {
  act();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", act);
}

// A search is done by typing.
byId("toolbar").addEventListener("submit", (event) => event.preventDefault());

// ---------------------------------------------------------------- words

const DASH = "–";
const grouped = new Intl.NumberFormat("en");

const formatCount = (number) => (number === null || number === undefined ? DASH : grouped.format(number));
const plural = (number, one, many = `${one}s`) => `${formatCount(number)} ${number === 1 ? one : many}`;

/** Format bytes in powers of 1024, as the command line does. */
function formatBytes(bytes) {
  if (bytes === null || bytes === undefined) return DASH;
  let unit = 0;
  while (bytes >= 1024 && unit < 4) {
    bytes /= 1024;
    unit += 1;
  }
  return `${bytes.toFixed(unit ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

/** Format seconds with three digits that mean something. */
function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return DASH;
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (size < 1) return `${(seconds * 1e3).toPrecision(3)} ms`;
  return size < 1000 ? `${seconds.toPrecision(3)} s` : `${grouped.format(Math.round(seconds))} s`;
}

/** Format an age in seconds, as the command line does. */
function formatAge(seconds) {
  if (seconds === null) return DASH;
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["m", 60]]) {
    if (seconds >= length) return `${Math.round(seconds / length)}${unit}`;
  }
  return `${Math.max(0, Math.round(seconds))}s`;
}

/** Format epoch seconds in UTC: a page is read elsewhere than where it was written. */
const formatMoment = (epoch) => `${new Date(epoch * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC`;

// ---------------------------------------------------------------- parts of a page

/** Fill a list of numbers from pairs of title and text. */
function showFacts(list, facts) {
  const fact = ([title, text]) => element("div", {}, element("dt", {}, title), element("dd", {}, text));
  list.replaceChildren(...facts.map(fact));
}

/** Make a bar of a share of the whole width; pieces are pairs of share and colour. */
function bar(pieces) {
  const whole = sum(pieces, ([share]) => share);
  const parts = pieces.map(([share, fill]) => {
    return element("span", { style: `width: ${whole ? (100 * share) / whole : 0}%; background: ${fill}` });
  });
  return element("div", { className: "bar", style: `width: ${100 * whole}%` }, ...parts);
}

/** Make a button that reads as text. */
const link = (text, onclick, more) => element("button", { type: "button", className: "link", onclick, ...more }, text);

/** Make a small square of a colour. */
const swatch = (fill) => element("span", { className: "swatch", style: `background: ${fill}` });

/** Return a column of numbers that sorts by a value and shows it in a format. */
const number = (title, value, format) => ({ title, value, cell: (row) => format(value(row)), kind: "number" });

/**
 * A table that sorts by its titles and shows one page of rows, so that 100,000 rows cost no more than 25.
 *
 * A column has a `title`, a `value` of a row to sort by, and a `cell`: what is shown, by default the value. `kind` is
 * the class of its cells. A table without `sorted` keeps the order of its rows and has no buttons. `size` is the number
 * of rows of a page, `empty` stands below a table without rows.
 */
class DataTable {
  constructor(host, { columns, caption, sorted = null, descending = false, size = 25, empty = "None." }) {
    this.empty = empty;
    this.columns = columns;
    this.size = size;
    this.sorted = sorted;
    this.descending = descending;
    this.sortable = sorted !== null;
    this.rows = [];
    this.first = 0;
    this.titles = columns.map((column, place) => this.title(column, place));
    this.body = element("tbody");
    this.count = element("span");
    this.back = element("button", { type: "button", onclick: () => this.turn(-1) }, "Previous");
    this.on = element("button", { type: "button", onclick: () => this.turn(1) }, "Next");
    this.pager = element("div", { className: "pager" }, this.back, this.on, this.count);
    const head = element("thead", {}, element("tr", {}, ...this.titles));
    const table = element("table", { "aria-label": caption }, head, this.body);
    host.replaceChildren(element("div", { className: "table" }, table), this.pager);
  }

  title(column, place) {
    const sorting = () => element("button", { type: "button", onclick: () => this.sortBy(place) }, column.title);
    return element("th", { scope: "col", className: column.kind }, this.sortable ? sorting() : column.title);
  }

  sortBy(place) {
    // What is large is looked for first, and names from A.
    const starts = this.columns[place].kind === "number";
    this.descending = this.sorted === place ? !this.descending : starts;
    this.sorted = place;
    this.show(this.rows);
  }

  turn(pages) {
    this.first += pages * this.size;
    this.fill();
  }

  /** Show other rows, from the first. */
  show(rows) {
    this.rows = this.sortable ? this.inOrder(rows) : rows;
    this.first = 0;
    this.fill();
  }

  inOrder(rows) {
    const value = this.columns[this.sorted].value;
    const sign = this.descending ? -1 : 1;
    const keyed = rows.map((row) => [value(row), row]);
    keyed.sort(([one], [other]) => {
      // What is unknown comes last in either direction.
      if (one === null || other === null) return (one === null) - (other === null);
      return one < other ? -sign : one > other ? sign : 0;
    });
    return keyed.map(([, row]) => row);
  }

  fill() {
    const shown = this.rows.slice(this.first, this.first + this.size);
    this.body.replaceChildren(...shown.map((row) => this.row(row)));
    this.titles.forEach((title, place) => {
      if (place === this.sorted) title.setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      else title.removeAttribute("aria-sort");
    });
    const last = this.first + shown.length;
    this.pager.hidden = this.rows.length > 0 && this.rows.length <= this.size;
    this.back.hidden = this.on.hidden = !this.rows.length;
    this.back.disabled = this.first === 0;
    this.on.disabled = last >= this.rows.length;
    this.count.textContent = this.rows.length
      ? `${formatCount(this.first + 1)}–${formatCount(last)} of ${formatCount(this.rows.length)}`
      : this.empty;
  }

  row(row) {
    const cells = this.columns.map(({ title, value, cell = value, kind }) => [title, kind, cell(row)]);
    return element("tr", {}, ...cells.map(([title, kind, text]) => element("td", { className: kind, "data-title": title }, text)));
  }
}

/** The box beside a drawing that shows the details of what is under the mouse, or was chosen by key. */
const tip = {
  /** Show a title and pairs of name and text near a point of the window; pairs without text are left out. */
  show(title, pairs, x, y) {
    const known = pairs.filter(([, text]) => text !== null && text !== undefined && text !== "");
    const list = known.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]);
    const box = byId("tip");
    box.replaceChildren(element("strong", {}, title), element("dl", {}, ...list));
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const below = y + 18;
    box.style.left = `${clamp(x + 12, 8, Math.max(8, innerWidth - width - 8))}px`;
    box.style.top = `${below + height < innerHeight ? below : Math.max(8, y - height - 12)}px`;
  },

  hide() {
    byId("tip").hidden = true;
  },
};

/** Have a title and pairs of name and text read aloud; pairs without text are left out. */
function say(title, pairs) {
  const texts = pairs.map(([name, text]) => text && `${name} ${text}`);
  byId("said").textContent = [title, ...texts].filter(Boolean).join(", ");
}

/** Fit a canvas to its place and to the pixels of the screen; return its context, scaled to CSS pixels. */
function fitCanvas(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

// The font of drawings, whose letters are all as wide as LETTER: to measure each text would take longer than to draw it.
const FONT = "11px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
const LETTER = 6.7;

/** Return a text cut to a width in FONT; empty if little would be left. */
function cut(text, width) {
  const room = Math.floor(width / LETTER);
  if (text.length <= room) return text;
  return room < 4 ? "" : `${text.slice(0, room - 1)}…`;
}
