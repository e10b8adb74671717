// The page of a report: a map of areas by size, ages, findings, and a table of entries, the smallest of many summed.

const HEADING = 17; // The name of an area that shows what is inside it.
const SMALLEST = 24; // Square pixels of an area that is drawn by itself.
const HUES = 8; // The colours of layers.
const DAY = 86400;

const entries = data.entries.map(([layer, place, stale, kernel, key, bytes, changed, used, count]) => {
  const words = { layer: word(layer), place: word(place), kernel: word(kernel), stale: word(stale) };
  return { ...words, key, bytes, changed, used, count };
});
const ageOf = (time) => (time === null ? null : data.generated - time);

// ---------------------------------------------------------------- the tree of the map

/** Make the tree: layer, device or Python, kernel; each with its sums, and what is inside it, largest first. */
function makeTree() {
  const top = makeNode("all layers", null);
  for (const entry of entries) {
    let node = top;
    add(node, entry);
    for (const name of [entry.layer, entry.place, entry.kernel ?? "unknown kernel"]) {
      if (!node.inside.has(name)) node.inside.set(name, makeNode(name, node));
      node = node.inside.get(name);
      add(node, entry);
    }
  }
  arrange(top);
  const order = data.layers.filter((name) => top.inside.has(name));
  order.forEach((name, place) => (top.inside.get(name).hue = place % HUES));
  return top;
}

function makeNode(name, outer) {
  const sums = { bytes: 0, entries: 0, staleBytes: 0 };
  return { name, outer, ...sums, inside: new Map(), children: [], rests: new Map(), hue: null };
}

function add(node, entry) {
  node.bytes += entry.bytes;
  node.entries += entry.count;
  if (entry.stale !== null) node.staleBytes += entry.bytes;
}

function arrange(node) {
  node.children = [...node.inside.values()].sort((one, other) => other.bytes - one.bytes);
  node.children.forEach(arrange);
}

const hueOf = (node) => node.hue ?? (node.outer ? hueOf(node.outer) : null);

const tree = makeTree();

// ---------------------------------------------------------------- the map

const canvas = byId("map");
let shown = tree; // The area that fills the map.
let areas = []; // What is drawn of it, outer areas before those inside them.
let chosen = null;
let colours = {};

const draw = onNextFrame(drawNow);

/** Read the colours of the scheme, and draw in them. */
function recolour() {
  for (const name of ["ink", "faint", "on-tile"]) colours[name] = colour(`--${name}`);
  colours.tiles = Array.from({ length: HUES }, (_, place) => colour(`--tile-${place}`));
  colours.hatch = hatching();
  draw();
}

/** Make the pattern that marks what is stale. */
function hatching() {
  const piece = element("canvas", { width: 8, height: 8 });
  const context = piece.getContext("2d");
  context.strokeStyle = colours["on-tile"];
  context.globalAlpha = 0.55;
  context.lineWidth = 1.5;
  context.beginPath();
  for (const shift of [-8, 0, 8]) {
    context.moveTo(shift, 8);
    context.lineTo(shift + 8, 0);
  }
  context.stroke();
  return context.createPattern(piece, "repeat");
}

function drawNow() {
  const width = canvas.parentElement.clientWidth;
  const height = clamp(width * 0.45, 240, 480);
  const context = fitCanvas(canvas, width, height);
  context.font = FONT;
  context.textBaseline = "middle";
  areas = [];
  fill(context, shown, { x: 0, y: 0, width, height }, 0);
  if (!areas.length) {
    context.fillStyle = colours.faint;
    context.fillText("No entries.", 8, 20);
  }
  const area = chosen && areas.find((one) => one.node === chosen);
  if (area) {
    context.strokeStyle = colours.ink;
    context.lineWidth = 3;
    context.strokeRect(area.x + 1.5, area.y + 1.5, Math.max(area.width - 4, 1), Math.max(area.height - 4, 1));
  }
}

/** Draw what is inside an area; an area with room for its name and its inside shows both. */
function fill(context, node, box, depth) {
  for (const area of squarify(node.children, box)) {
    area.depth = depth;
    areas.push(area);
    drawArea(context, area);
    const { x, y, width, height } = area;
    const inner = { x: x + 3, y: y + HEADING, width: width - 7, height: height - HEADING - 4 };
    if (area.node.children.length && inner.width > 40 && inner.height > 20) fill(context, area.node, inner, depth + 1);
  }
}

function drawArea(context, { node, x, y, width, height, depth }) {
  const [wide, tall] = [Math.max(width - 1, 0.5), Math.max(height - 1, 0.5)];
  context.fillStyle = colours.tiles[hueOf(node)] ?? colours.faint;
  context.fillRect(x, y, wide, tall);
  // What lies deeper is lighter.
  context.fillStyle = `rgb(255 255 255 / ${14 * depth}%)`;
  context.fillRect(x, y, wide, tall);
  if (node.staleBytes && (!node.children.length || height < HEADING + 24)) {
    const part = (tall * node.staleBytes) / node.bytes;
    context.fillStyle = colours.hatch;
    context.fillRect(x, y + tall - part, wide, part);
  }
  if (wide < 34 || tall < 13) return;
  const size = formatBytes(node.bytes);
  const both = `${node.name} ${size}`;
  context.fillStyle = colours["on-tile"];
  context.fillText(cut(both.length * LETTER < wide - 8 ? both : node.name, wide - 8), x + 4, y + 9);
}

/**
 * Divide a box among nodes by their bytes, in areas that are as square as possible (Bruls, Huizing, van Wijk: Squarified
 * Treemaps, 2000). Nodes too small to be seen are one area with the name of their number.
 */
function squarify(nodes, box) {
  const total = sum(nodes, (node) => node.bytes);
  if (!total) return [];
  const scale = (box.width * box.height) / total;
  const visible = nodes.filter((node) => node.bytes * scale >= SMALLEST);
  const rest = nodes.slice(visible.length);
  if (rest.length) visible.push(together(rest));
  const left = { ...box };
  const placed = [];
  let strip = [];
  for (const node of visible) {
    const side = Math.min(left.width, left.height);
    if (strip.length && worst([...strip, node], side, scale) > worst(strip, side, scale)) {
      placed.push(...lay(strip, left, scale));
      strip = [];
    }
    strip.push(node);
  }
  return [...placed, ...lay(strip, left, scale)];
}

/** Return one node for the smallest nodes of an area: the same for the same ones, so that it stays chosen. */
function together(nodes) {
  const outer = nodes[0].outer;
  if (!outer.rests.has(nodes.length)) {
    const made = makeNode(`${formatCount(nodes.length)} more`, outer);
    for (const name of ["bytes", "entries", "staleBytes"]) made[name] = sum(nodes, (node) => node[name]);
    outer.rests.set(nodes.length, made);
  }
  return outer.rests.get(nodes.length);
}

/** Return how far the areas of a strip are from squares: the worst ratio of their sides. */
function worst(strip, side, scale) {
  const whole = sum(strip, (node) => node.bytes) * scale;
  const sizes = [strip[0].bytes * scale, strip.at(-1).bytes * scale];
  return Math.max(...sizes.flatMap((size) => [(side * side * size) / whole ** 2, whole ** 2 / (side * side * size)]));
}

/** Lay a strip along the shorter side of what is left of a box, and take it away from it. */
function lay(strip, left, scale) {
  const upright = left.width >= left.height;
  const side = upright ? left.height : left.width;
  const deep = side ? (sum(strip, (node) => node.bytes) * scale) / side : 0;
  let at = upright ? left.y : left.x;
  const placed = strip.map((node) => {
    const long = deep ? (node.bytes * scale) / deep : 0;
    at += long;
    if (upright) return { node, x: left.x, y: at - long, width: deep, height: long };
    return { node, x: at - long, y: left.y, width: long, height: deep };
  });
  if (upright) Object.assign(left, { x: left.x + deep, width: left.width - deep });
  else Object.assign(left, { y: left.y + deep, height: left.height - deep });
  return placed;
}

// ---------------------------------------------------------------- walking the map

function enter(node) {
  shown = node;
  chosen = null;
  tip.hide();
  showPath();
  showLevel();
  draw();
}

function showPath() {
  const path = [];
  for (let node = shown; node; node = node.outer) path.unshift(node);
  const steps = path.map((node) => {
    return element("button", { type: "button", disabled: node === shown, onclick: () => enter(node) }, node.name);
  });
  byId("path").replaceChildren(...steps.flatMap((button, place) => (place ? [" › ", button] : [button])));
}

/** Show what is inside the area as a table: the map for those who do not see it. */
function showLevel() {
  const most = Math.max(shown.children[0]?.bytes ?? 0, 1);
  const into = (node) => (node.children.length ? () => enter(node) : () => searchFor(node.name));
  const fresh = (node) => [(node.bytes - node.staleBytes) / most, `var(--tile-${hueOf(node)})`];
  const parts = (node) => [fresh(node), [node.staleBytes / most, "var(--stale)"]];
  const columns = [
    { title: "name", value: (node) => node.name, cell: (node) => link(node.name, into(node)), kind: "name" },
    number("entries", (node) => node.entries, formatCount),
    number("size", (node) => node.bytes, formatBytes),
    number("stale", (node) => node.staleBytes, sized),
    { title: "share", value: (node) => node.bytes, cell: (node) => bar(parts(node)), kind: "wide" },
  ];
  const table = { columns, caption: `Inside ${shown.name}`, sorted: 2, descending: true, size: 8 };
  new DataTable(byId("level"), table).show(shown.children);
}

const sized = (bytes) => (bytes ? formatBytes(bytes) : "");

function describe(node) {
  return [
    ["size", formatBytes(node.bytes)],
    ["entries", formatCount(node.entries)],
    ["stale", sized(node.staleBytes)],
    ["in", node.outer === tree ? null : node.outer?.name],
  ];
}

function areaAt(x, y) {
  const inside = (area) => x >= area.x && x < area.x + area.width && y >= area.y && y < area.y + area.height;
  return areas.findLast(inside) ?? null;
}

function mark(node) {
  if (node !== chosen) draw();
  chosen = node;
}

function choose(area) {
  mark(area?.node ?? null);
  if (!area) return;
  const box = canvas.getBoundingClientRect();
  const pairs = describe(area.node);
  tip.show(area.node.name, pairs, box.left + area.x + area.width / 2, box.top + area.y + area.height / 2);
  say(area.node.name, pairs);
}

/** Go one step into what is under the mouse, or list the entries of a kernel. */
function open(node) {
  let step = node;
  while (step.outer && step.outer !== shown) step = step.outer;
  if (step.children.length) enter(step);
  else if (tree !== step && step.outer.inside.has(step.name)) searchFor(step.name);
}

canvas.addEventListener("pointermove", (event) => {
  const area = areaAt(event.offsetX, event.offsetY);
  if (!area) return;
  mark(area.node);
  tip.show(area.node.name, describe(area.node), event.clientX, event.clientY);
});
canvas.addEventListener("pointerleave", () => {
  tip.hide();
  mark(null);
});
canvas.addEventListener("click", (event) => {
  const area = areaAt(event.offsetX, event.offsetY);
  if (area) open(area.node);
});
canvas.addEventListener("blur", tip.hide);

const STEPS = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 };

canvas.addEventListener("keydown", (event) => {
  if (isShortcut(event)) return;
  if (STEPS[event.key]) choose(nextArea(STEPS[event.key]));
  else if (event.key === "Enter" && chosen) open(chosen);
  else if (event.key === "Escape" && shown.outer) enter(shown.outer);
  else return;
  event.preventDefault();
});

/** Return the next or previous one of the outermost areas, which are in the order of their sizes. */
function nextArea(step) {
  const level = areas.filter((area) => area.depth === 0);
  const at = level.findIndex((area) => area.node === chosen);
  return level[clamp(at + step, 0, level.length - 1)] ?? null;
}

document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.tagName === "INPUT") return;
  event.preventDefault();
  search.focus();
});

// ---------------------------------------------------------------- ages

/** Show how many entries were used or changed how long ago, and their bytes. */
function showAges() {
  const titles = [...AGES.map(([, title]) => title), "unknown"];
  const groups = titles.map((title) => ({ title, fresh: 0, stale: 0, bytes: 0 }));
  for (const entry of entries) {
    const age = ageOf(entry.used ?? entry.changed);
    const group = groups[age === null ? AGES.length : AGES.findIndex(([limit]) => age < limit)];
    group[entry.stale === null ? "fresh" : "stale"] += entry.count;
    group.bytes += entry.bytes;
  }
  const most = Math.max(...groups.map((group) => group.fresh + group.stale), 1);
  const parts = (group) => [[group.fresh / most, "var(--bar)"], [group.stale / most, "var(--stale)"]];
  const columns = [
    { title: "age", value: (group) => group.title },
    { title: "share", cell: (group) => bar(parts(group)), kind: "wide" },
    number("entries", (group) => group.fresh + group.stale, formatCount),
    number("size", (group) => group.bytes, formatBytes),
  ];
  new DataTable(byId("ages"), { columns, caption: "Ages" }).show(groups.filter((group) => group.bytes));
}

const AGES = [
  [3600, "less than 1 h"],
  [DAY, "1 h to 1 day"],
  [7 * DAY, "1 to 7 days"],
  [30 * DAY, "7 to 30 days"],
  [180 * DAY, "30 to 180 days"],
  [Infinity, "180 days and more"],
];
// ---------------------------------------------------------------- tables

const text = (title, place, kind) => ({ title, value: (row) => row[place], cell: (row) => row[place] ?? DASH, kind });

function showFindings() {
  const words = (row) => row[4].split(" ").flatMap((part, place) => [place ? " " : "", element("span", {}, part)]);
  const fix = { ...text("fix", 4, "long fix"), cell: (row) => element("code", {}, ...words(row)) };
  const columns = [text("layer", 0), text("effect", 1), text("finding", 3, "long"), text("place", 2, "long name"), fix];
  const table = { columns, caption: "Findings", size: 10, empty: "No problem was found." };
  new DataTable(byId("findings"), table).show(data.findings);
}

function showKernels() {
  const sizes = [number("size", (row) => row[2], formatBytes), number("entries", (row) => row[3], formatCount)];
  const age = number("age", (row) => ageOf(row[4]), formatAge);
  const columns = [text("kernel", 0, "name"), text("layers", 1), ...sizes, age];
  const table = { columns, caption: "Kernels", sorted: 2, descending: true, size: 10, empty: "No entries." };
  new DataTable(byId("kernels"), table).show(data.kernels);
}

// ---------------------------------------------------------------- entries

const search = byId("search");
const onlyStale = byId("only-stale");

const ENTRIES = [
  { title: "kernel", value: (entry) => entry.kernel, cell: (entry) => entry.kernel ?? DASH, kind: "name" },
  { title: "layer", value: (entry) => entry.layer },
  { title: "device or Python", value: (entry) => entry.place },
  number("size", (entry) => entry.bytes, formatBytes),
  number("changed", (entry) => ageOf(entry.changed), formatAge),
  number("used", (entry) => ageOf(entry.used), formatAge),
  { title: "stale", value: (entry) => entry.stale, cell: (entry) => entry.stale ?? "", kind: "long stale" },
  { title: "key", value: (entry) => entry.key, kind: "name key" },
];
const listed = new DataTable(byId("entries"), { columns: ENTRIES, caption: "Entries", sorted: 3, descending: true });
// What is searched in, made at the first search.
let texts = null;

function find() {
  const wanted = search.value.trim().toLowerCase();
  const parts = (entry) => `${entry.kernel ?? ""}\n${entry.layer}\n${entry.place}\n${entry.key}`;
  if (wanted) texts ??= entries.map((entry) => parts(entry).toLowerCase());
  const isWanted = (entry, place) => !wanted || texts[place].includes(wanted);
  const found = entries.filter((entry, place) => isWanted(entry, place) && (!onlyStale.checked || entry.stale !== null));
  const [count, bytes] = ["count", "bytes"].map((name) => sum(found, (entry) => entry[name]));
  byId("matches").textContent = `${plural(count, "entry", "entries")}, ${formatBytes(bytes)}`;
  listed.show(found);
}

function searchFor(wanted) {
  search.value = wanted;
  find();
  byId("entries-title").scrollIntoView({ block: "start" });
}

onlyStale.addEventListener("change", find);
search.addEventListener("input", onNextFrame(find));

// ---------------------------------------------------------------- the page

function showHead() {
  const more = data.complete ? "" : "+";
  const [count, bytes, stale, isStaleKnown] = data.total;
  byId("generated").textContent = `Read ${formatMoment(data.generated)}.`;
  showFacts(byId("facts"), [
    ["findings", [data.findings.length || "none", ...new Set(data.findings.map((row) => row[1]))].join(" · ")],
    ["size", formatBytes(bytes) + more],
    // The map and the ages sum these; the size has the files and folders around them too.
    ["entries", `${formatCount(count)}${more} · ${formatBytes(tree.bytes)}`],
    ["stale", isStaleKnown ? formatBytes(stale) : stale ? `${formatBytes(stale)}+` : DASH],
  ]);
  byId("missing").hidden = !data.missing.length;
  byId("missing-list").replaceChildren(...data.missing.map((line) => element("li", {}, line)));
}

showHead();
onScheme(recolour);
enter(tree);
showAges();
showFindings();
showKernels();
find();
new ResizeObserver(draw).observe(canvas.parentElement);
