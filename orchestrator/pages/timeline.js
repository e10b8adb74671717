// The timeline of a run. Rows are threads, bars are spans; a span inside another lies one lane below it.

const ROW = 20; // A lane, with the gap below its bars.
const HEADING = 24; // The name of a thread.
const AXIS = 24;
const NARROWEST = 1e-6; // Seconds that the whole width shows at most zoom.
const JITTER = 1e-7; // Seconds by which neighbours may overlap: times are rounded.
const MARKS = { hit: "✓", miss: "✗", store: "↓" };

/** Read the spans of the page, in the order in which they begin; an outer one comes before those inside it. */
function readSpans() {
  const spans = data.spans.map(([process, thread, stage, name, layer, kernel, outcome, start, seconds, bytes]) => {
    const words = { stage: word(stage), name: word(name), layer: word(layer), kernel: word(kernel) };
    // A wait for several kernels that were launched before it belongs to none of them.
    const isShared = words.stage === "launch" && words.kernel?.includes(" ");
    // Its own seconds are without the spans inside it; its kernel may be that of the span around it.
    const derived = { end: start + seconds, own: seconds, of: isShared ? null : words.kernel, depth: 0, row: null };
    return { ...words, outcome: word(outcome), process, thread, start, seconds, bytes, ...derived };
  });
  return spans.sort((one, other) => one.start - other.start || other.seconds - one.seconds);
}

/** Give each span its lane and its own time; return the rows: a thread each, with the spans of each lane. */
function layOut(spans) {
  const rows = new Map();
  // Processes in the order of the run, each with its threads in the order in which they began.
  const order = new Map(data.processes.map(([process], place) => [process, place]));
  for (const span of spans) {
    const id = `${span.process} ${span.thread}`;
    if (!rows.has(id)) rows.set(id, { process: span.process, lanes: [], open: [], place: rows.size });
    const row = (span.row = rows.get(id));
    while (row.open.length && row.open.at(-1).end <= span.start + JITTER) row.open.pop();
    const outer = row.open.at(-1);
    if (outer) {
      outer.own -= Math.min(span.end, outer.end) - span.start;
      span.of ??= outer.of;
    }
    span.depth = row.open.push(span) - 1;
    (row.lanes[span.depth] ??= []).push(span);
  }
  const place = (row) => order.get(row.process) ?? order.size;
  return [...rows.values()].sort((one, other) => place(one) - place(other) || one.place - other.place);
}

/** Name each row: the process where it begins, and the thread where there are several. */
function nameRows(rows) {
  const known = new Map(data.processes.map((process) => [process[0], process]));
  const threads = Map.groupBy(rows, (row) => row.process);
  const hosts = new Set(data.processes.map((process) => process[2]));
  for (const row of rows) {
    const [, command = "", host = "", rank = null] = known.get(row.process) ?? [];
    const number = threads.get(row.process).indexOf(row);
    row.who = rank === null ? `process ${row.process}` : `rank ${rank}`;
    if (number > 0) row.title = `${row.who} · thread ${number + 1}`;
    else row.title = [row.who, command, hosts.size > 1 ? host : ""].filter(Boolean).join(" · ");
    row.begins = number === 0;
  }
}

const spans = readSpans();
const rows = layOut(spans);
nameRows(rows);

const whole = Math.max(data.wall, ...rows.flatMap((row) => row.lanes.map((lane) => lane.at(-1).end)), NARROWEST);
const height = rows.reduce((y, row) => {
  row.y = y;
  return y + HEADING + row.lanes.length * ROW + 6;
}, AXIS);

// ---------------------------------------------------------------- state

const canvas = byId("chart");
const viewport = byId("viewport");
const view = { start: 0, seconds: whole };
let context;
let width = 0;
let visible = 0; // The height of the canvas.
let colours = {};
let matches = null; // The spans that the search found, or null without a search.
let chosen = null;

const draw = onNextFrame(drawNow);
const xOf = (time) => ((time - view.start) / view.seconds) * width;
const timeAt = (x) => view.start + (x / width) * view.seconds;

/** Read the colours of the scheme, and draw in them. */
function recolour() {
  const names = ["ink", "faint", "line", "accent", "hit", "miss", "store", "on-stage", "page"];
  for (const name of [...names, ...data.stages.map((stage) => `stage-${stage}`)]) colours[name] = colour(`--${name}`);
  draw();
}

function resize() {
  width = viewport.clientWidth;
  const most = parseFloat(getComputedStyle(viewport).maxHeight) || innerHeight;
  visible = Math.min(height, most - 2);
  context = fitCanvas(canvas, width, visible);
  byId("height").style.height = `${height - visible}px`;
  drawNow();
}

// ---------------------------------------------------------------- drawing

function drawNow() {
  context.clearRect(0, 0, width, visible);
  context.font = FONT;
  context.textBaseline = "middle";
  const top = viewport.scrollTop;
  const ticks = tickTimes();
  context.fillStyle = colours.line;
  for (const { x } of ticks) context.fillRect(Math.round(x), AXIS, 1, visible);
  for (const row of rows) {
    const y = row.y - top;
    if (y > visible || y + HEADING + row.lanes.length * ROW < AXIS) continue;
    drawHeading(row, y);
    row.lanes.forEach((lane, depth) => drawLane(lane, y + HEADING + depth * ROW));
  }
  if (chosen) outline(chosen, top);
  drawAxis(ticks);
}

/** Return some 8 round times in view, with their places and texts. */
function tickTimes() {
  const rough = view.seconds / clamp(width / 110, 2, 12);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const [unit, factor] = step < 1e-3 ? ["µs", 1e6] : step < 1 ? ["ms", 1e3] : ["s", 1];
  const ticks = [];
  for (let number = Math.ceil(view.start / step); number * step <= view.start + view.seconds; number += 1) {
    const text = `${grouped.format(Math.round(number * step * factor * 1e3) / 1e3)} ${unit}`;
    ticks.push({ x: xOf(number * step), text });
  }
  return ticks;
}

function drawAxis(ticks) {
  context.fillStyle = colours.page;
  context.fillRect(0, 0, width, AXIS);
  context.fillStyle = colours.faint;
  for (const { x, text } of ticks) {
    // The last one would be cut.
    if (x + 4 + text.length * LETTER < width) context.fillText(text, Math.round(x) + 4, AXIS / 2);
  }
  context.fillStyle = colours.line;
  context.fillRect(0, AXIS - 1, width, 1);
}

function drawHeading(row, y) {
  if (row.begins && row !== rows[0]) {
    context.fillStyle = colours.line;
    context.fillRect(0, y, width, 1);
  }
  context.fillStyle = row.begins ? colours.ink : colours.faint;
  context.fillText(cut(row.title, width - 12), 6, y + HEADING / 2 + 1);
}

/** Draw the spans of a lane that are in view. Spans narrower than a pixel that share one are drawn once. */
function drawLane(lane, y) {
  if (y > visible || y + ROW < AXIS) return;
  const last = view.start + view.seconds;
  let edge = -1;
  for (let place = firstAfter(lane, view.start); place < lane.length && lane[place].start < last; place += 1) {
    const span = lane[place];
    const found = matches === null || matches.has(span);
    const left = Math.max(xOf(span.start), -2);
    const right = Math.min(Math.max(xOf(span.end), left + 1), width + 2);
    // A match is always seen, over what hides it too.
    if (right <= edge && !(found && matches)) continue;
    edge = Math.ceil(right);
    drawBar(span, left, right - left, y, found);
  }
}

/** Return the place of the first span of a lane that ends after a time; spans of a lane do not overlap. */
function firstAfter(lane, time) {
  let [low, high] = [0, lane.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane[middle].end > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

function drawBar(span, x, size, y, found) {
  const tall = ROW - 3;
  // A gap between neighbours, where there is room for one.
  const wide = size > 3 ? size - 1 : size;
  context.globalAlpha = found ? 1 : 0.18;
  context.fillStyle = colours[`stage-${span.stage}`];
  context.fillRect(x, y, wide, tall);
  if (span.outcome) {
    context.fillStyle = colours[span.outcome] ?? colours.ink;
    context.fillRect(x, y + tall - 3, wide, 3);
  }
  if (wide > 24 && found) {
    const mark = MARKS[span.outcome];
    const text = `${mark ? `${mark} ` : ""}${span.kernel ?? span.name}`;
    // The text of a span that began further left stays in view.
    const left = Math.max(x, 0) + 4;
    context.fillStyle = colours["on-stage"];
    context.fillText(cut(text, x + wide - left - 2), left, y + tall / 2 - (span.outcome ? 1 : 0));
  }
  context.globalAlpha = 1;
}

const yOf = (span) => span.row.y + HEADING + span.depth * ROW;

function outline(span, top) {
  const x = xOf(span.start);
  context.strokeStyle = colours.accent;
  context.lineWidth = 2;
  context.strokeRect(x, yOf(span) - top, Math.max(xOf(span.end) - x, 2), ROW - 3);
}

// ---------------------------------------------------------------- moving

/** Show a part of the run; what lies outside of it is not shown. */
function showPart(start, seconds) {
  view.seconds = clamp(seconds, NARROWEST, whole);
  view.start = clamp(start, 0, whole - view.seconds);
  draw();
}

/** Zoom by a factor and keep the time at a place, by default the chosen span or the middle. */
function zoom(factor, x = chosen && inView(chosen) ? xOf(chosen.start + chosen.seconds / 2) : width / 2) {
  const time = timeAt(x);
  const seconds = clamp(view.seconds * factor, NARROWEST, whole);
  showPart(time - (x / width) * seconds, seconds);
}

const move = (share) => showPart(view.start + share * view.seconds, view.seconds);
const inView = (span) => span.end > view.start && span.start < view.start + view.seconds;

/** Bring a span into view: where it is, or as wide as a third of the view. */
function bringIntoView(span, closer = false) {
  if (closer) showPart(span.start - span.seconds, Math.max(3 * span.seconds, NARROWEST));
  else if (!inView(span)) showPart(span.start + span.seconds / 2 - view.seconds / 2, view.seconds);
  const y = yOf(span);
  if (y < viewport.scrollTop + AXIS + HEADING) viewport.scrollTop = y - AXIS - HEADING;
  else if (y + ROW > viewport.scrollTop + visible) viewport.scrollTop = y + ROW - visible + 4;
}

// ---------------------------------------------------------------- details

function details(span) {
  return [
    ["stage", span.stage],
    ["kernel", span.of],
    ["layer", span.layer],
    ["outcome", span.outcome],
    ["size", span.bytes === null ? null : formatBytes(span.bytes)],
    ["begins at", formatSeconds(span.start)],
    ["takes", formatSeconds(span.seconds)],
    ["of its own", span.own < span.seconds ? formatSeconds(span.own) : null],
    ["in", span.row.title],
  ];
}

/** Choose a span: it is outlined, described, and read aloud. */
function choose(span, closer = false) {
  if (span === null) {
    chosen = null;
    tip.hide();
    byId("said").textContent = "";
    draw();
    return;
  }
  describe(span, closer);
  say(span.name, details(span));
  showTip(span, clamp(xOf(span.start), 0, width), yOf(span) - viewport.scrollTop + ROW / 2);
}

function showTip(span, x, y) {
  const box = canvas.getBoundingClientRect();
  tip.show(span.name, details(span), box.left + x, box.top + y);
}

function spanAt(x, y) {
  if (y < AXIS) return null;
  const down = y + viewport.scrollTop;
  const row = rows.findLast((one) => one.y <= down);
  const lane = row?.lanes[Math.floor((down - row.y - HEADING) / ROW)];
  if (!lane) return null;
  // A pixel to either side belongs to a span that is narrower than the tip of the mouse.
  const span = lane[firstAfter(lane, timeAt(x - 1))];
  return span && span.start <= timeAt(x + 1) ? span : null;
}

// ---------------------------------------------------------------- mouse

let held = null; // Where the mouse was, while a button is held.
let dragged = 0;

canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  held = { x: event.offsetX, y: event.offsetY };
  dragged = 0;
});

canvas.addEventListener("pointermove", (event) => {
  const { offsetX: x, offsetY: y } = event;
  if (!held) return hover(spanAt(x, y), x, y);
  move((held.x - x) / width);
  viewport.scrollTop += held.y - y;
  dragged += Math.abs(x - held.x) + Math.abs(y - held.y);
  held = { x, y };
  tip.hide();
});

for (const end of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(end, (event) => {
    held = null;
    // A click, not the end of a drag.
    if (end === "pointerup" && dragged < 4) choose(spanAt(event.offsetX, event.offsetY));
  });
}

canvas.addEventListener("pointerleave", () => hover(null));
canvas.addEventListener(
  "wheel",
  (event) => {
    const sideways = event.shiftKey ? event.deltaY : event.deltaX;
    // Zoomed out entirely, the wheel scrolls on down the page.
    if (!event.shiftKey && event.deltaY > 0 && view.seconds >= whole) return;
    event.preventDefault();
    if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) move(sideways / width);
    else zoom(1.0015 ** event.deltaY, event.offsetX);
  },
  { passive: false },
);

function hover(span, x, y) {
  if (span) showTip(span, x, y);
  else tip.hide();
}

// ---------------------------------------------------------------- keys

const MOVES = {
  "+": () => zoom(1 / 1.5),
  "=": () => zoom(1 / 1.5),
  "-": () => zoom(1.5),
  0: () => showPart(0, whole),
  n: () => step(1),
  p: () => step(-1),
};
const MOVES_IN_CHART = {
  ArrowLeft: () => move(-0.15),
  ArrowRight: () => move(0.15),
  ArrowUp: () => (viewport.scrollTop -= 3 * ROW),
  ArrowDown: () => (viewport.scrollTop += 3 * ROW),
  Home: () => showPart(0, view.seconds),
  End: () => showPart(whole - view.seconds, view.seconds),
  Enter: () => chosen && choose(chosen, true),
};

document.addEventListener("keydown", (event) => {
  if (isShortcut(event)) return;
  if (event.key === "Escape") choose(null);
  if (event.key === "Escape" || event.target.tagName === "INPUT") return;
  const act = event.key === "/" ? () => byId("search").focus() : (MOVES[event.key] ?? null);
  const inChart = event.target === canvas ? (MOVES_IN_CHART[event.key] ?? null) : null;
  if (!act && !inChart) return;
  event.preventDefault();
  (inChart ?? act)();
});

/** Choose the next or previous span: of the matches, if there is a search. */
function step(by) {
  const all = matches === null ? spans : [...matches];
  if (!all.length) return;
  const at = chosen === null ? -1 : all.indexOf(chosen);
  const next = at < 0 && by < 0 ? all.length - 1 : (at + by + all.length) % all.length;
  choose(all[next]);
}

// ---------------------------------------------------------------- search

const search = byId("search");
const sized = (bytes) => (bytes === null ? "" : formatBytes(bytes));
const LISTED = [
  number("begins", (span) => span.start, formatSeconds),
  number("takes", (span) => span.seconds, formatSeconds),
  { title: "span", value: (span) => span.name, cell: (span) => choosing(span.name, span), kind: "name" },
  { title: "kernel", value: (span) => span.of, cell: (span) => span.of ?? "", kind: "name" },
  { title: "stage", value: (span) => span.stage, cell: (span) => staged(span.stage), kind: "whole" },
  { title: "layer", value: (span) => span.layer, cell: (span) => span.layer ?? "" },
  { title: "outcome", value: (span) => span.outcome, cell: (span) => outcome(span.outcome), kind: "whole" },
  number("size", (span) => span.bytes, sized),
  { title: "in", value: (span) => rows.indexOf(span.row), cell: (span) => span.row.who, kind: "whole" },
];
const listed = new DataTable(byId("spans"), { columns: LISTED, caption: "Spans", sorted: 0 });

function choosing(text, span) {
  // The chart stays where it is until the span is chosen; the focus alone describes it.
  const go = () => {
    viewport.scrollIntoView({ block: "center" });
    choose(span, true);
  };
  return link(text, go, { onfocus: () => describe(span) });
}

function describe(span, closer = false) {
  chosen = span;
  bringIntoView(span, closer);
  draw();
}

const staged = (stage) => element("span", {}, swatch(`var(--stage-${stage})`), stage);
const outcome = (name) => (name === null ? "" : element("span", { className: name }, `${MARKS[name] ?? ""} ${name}`));

function find() {
  const wanted = search.value.trim().toLowerCase();
  matches = wanted ? new Set(spans.filter((span) => span.of?.toLowerCase().includes(wanted))) : null;
  const found = matches === null ? spans : [...matches];
  const kernels = new Set(found.map((span) => span.of)).size;
  const counts = `${plural(found.length, "span")} of ${plural(kernels, "kernel")}`;
  byId("matches").textContent = matches === null ? "" : counts;
  byId("listed").textContent = matches === null ? "All spans of the run." : `Spans of kernels with “${wanted}”.`;
  if (chosen && matches && !matches.has(chosen)) choose(null);
  listed.show(found);
  draw();
}

search.addEventListener("input", find);
search.addEventListener("keydown", (event) => event.key === "Enter" && step(event.shiftKey ? -1 : 1));
byId("fit").addEventListener("click", () => showPart(0, whole));

// ---------------------------------------------------------------- summary

function sumUp(chooseGroup) {
  const groups = Map.groupBy(spans, chooseGroup);
  return [...groups].map(([name, members]) => {
    const seconds = ownSeconds(members);
    const having = (wanted) => members.filter((span) => span.outcome === wanted);
    const stages = data.stages.map((stage) => ownSeconds(members.filter((span) => span.stage === stage)));
    return { name, seconds, spans: members.length, hits: having("hit"), misses: having("miss"), stages };
  });
}

const ownSeconds = (among) => sum(among, (span) => span.own);
const timed = number("seconds", (group) => group.seconds, formatSeconds);
const HIT_AND_MISS = ["hits", "misses"].map((title) => ({
  ...number(title, (group) => group[title].length),
  cell: ({ [title]: spans }) =>
    spans.length ? `${formatCount(spans.length)} in ${formatSeconds(ownSeconds(spans))}` : "",
}));

function showStages() {
  const sums = sumUp((span) => span.stage);
  sums.sort((one, other) => data.stages.indexOf(one.name) - data.stages.indexOf(other.name));
  const most = Math.max(...sums.map((one) => one.seconds), NARROWEST);
  const columns = [
    { title: "stage", value: (one) => one.name, cell: (one) => staged(one.name), kind: "whole" },
    timed,
    { title: "share", cell: (one) => bar([[one.seconds / most, `var(--stage-${one.name})`]]), kind: "wide" },
    number("spans", (one) => one.spans, formatCount),
    ...HIT_AND_MISS,
  ];
  new DataTable(byId("stages"), { columns, caption: "Seconds of each stage", size: sums.length }).show(sums);
}

function showSlowest() {
  const sums = sumUp((span) => span.of).filter((one) => one.name !== null);
  sums.sort((one, other) => other.seconds - one.seconds);
  const most = Math.max(...sums.map((one) => one.seconds), NARROWEST);
  const searchFor = (name) => () => {
    search.value = name;
    find();
    viewport.scrollIntoView({ block: "center" });
    step(1);
  };
  const pieces = (one) => one.stages.map((seconds, place) => [seconds / most, `var(--stage-${data.stages[place]})`]);
  const columns = [
    { title: "kernel", value: (one) => one.name, cell: (one) => link(one.name, searchFor(one.name)), kind: "name" },
    timed,
    { title: "stages", cell: (one) => bar(pieces(one)), kind: "wide" },
    ...HIT_AND_MISS,
  ];
  new DataTable(byId("slowest"), { columns, caption: "Ten slowest kernels" }).show(sums.slice(0, 10));
}

function showLegend() {
  const stages = data.stages.filter((stage) => spans.some((span) => span.stage === stage));
  const marks = Object.keys(MARKS).filter((name) => spans.some((span) => span.outcome === name));
  byId("legend").replaceChildren(
    ...stages.map((stage) => element("li", {}, staged(stage))),
    ...marks.map((name) => element("li", {}, outcome(name))),
  );
}

/** Show why each kernel missed, and how its source differs, as on the terminal. */
function showMissed() {
  const kernels = data.missed.map(([kernel, seconds, layers, because]) => ({ kernel, seconds, layers, because }));
  byId("missed-part").hidden = kernels.length === 0;
  const columns = [
    { title: "kernel", value: (one) => one.kernel || "–", kind: "name" },
    timed,
    { title: "in", value: (one) => one.layers },
    { title: "because", value: (one) => one.because, kind: "long" },
  ];
  new DataTable(byId("missed"), { columns, caption: "Kernels that missed" }).show(kernels);
  byId("differences").replaceChildren(...data.missed.map(([, , , , diff]) => diff && element("pre", {}, diff)).filter(Boolean));
}

function showHead() {
  byId("verdict").textContent = data.verdict;
  byId("command").textContent = data.command;
  byId("started").textContent = `Started ${formatMoment(data.started)}.`;
  showFacts(byId("facts"), [
    ["wall time", formatSeconds(data.wall)],
    ["processes", formatCount(data.processes.length)],
    ["kernels", formatCount(new Set(spans.map((span) => span.of).filter((name) => name !== null)).size || null)],
    ["spans", formatCount(spans.length)],
  ]);
}

onScheme(recolour);
showHead();
showMissed();
showLegend();
showStages();
showSlowest();
find();
new ResizeObserver(resize).observe(viewport);
resize();
viewport.addEventListener("scroll", draw);
