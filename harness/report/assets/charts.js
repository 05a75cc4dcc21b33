// Two charts, drawn as SVG from what the filters let through.
const SVG = "http://www.w3.org/2000/svg";
const BAR = 16;
const STEP = 22;

function svg(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** The largest round number of ticks for a scale that ends at `most`. */
function ticks(most, count) {
  const rough = most / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, index) => index * step);
}

const short = (value) =>
  value >= 1e6 ? `${+(value / 1e6).toFixed(2)} M` : value >= 1e3 ? `${+(value / 1e3).toFixed(1)} k` : String(value);

/** Where values fall on an axis: {at: value -> 0..1, marks, log}. A wide range takes powers of ten, unless asked otherwise. */
function scaleOf(values, count) {
  const most = Math.max(...values, 1);
  const least = Math.max(1, Math.min(...values));
  const log = state.chart.scale ? state.chart.scale === "log" : most / least > 1000;
  if (!log) return { log, at: (value) => value / most, marks: ticks(most, count) };
  const [from, to] = [Math.floor(Math.log10(least)), Math.log10(most)];
  const span = Math.max(to - from, 1);
  const marks = Array.from({ length: Math.floor(from + span) - from + 1 }, (_, index) => 10 ** (from + index));
  return { log, at: (value) => (Math.log10(Math.max(value, 1)) - from) / span, marks };
}

/** Horizontal bars in groups: [{name, bars: [{label, value, hatched}]}]. */
function bars(title, unit, groups, width) {
  const narrow = width < 560;
  const names = Math.max(...groups.map((group) => wide(group.name, "650 11.5px")));
  const side = narrow ? 0 : Math.ceil(Math.min(220, Math.max(80, names + 14)));
  const labels = 16 + Math.max(...groups.flatMap((group) => group.bars.map((bar) => wide(bar.label, "11.5px"))));
  const room = Math.max(120, Math.floor(width - side - Math.min(labels, narrow ? width * 0.6 : 340)));
  const axis = scaleOf(groups.flatMap((group) => group.bars.map((bar) => bar.value)), narrow ? 3 : 6);
  const scale = (value) => axis.at(value) * room;
  const drawing = svg("svg", { role: "img", "aria-label": title, width });
  const pattern = svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  pattern.append(svg("rect", { width: 6, height: 6, class: "hatch-base" }), svg("rect", { width: 2, height: 6, class: "hatch-line" }));
  drawing.append(svg("defs", {}, pattern));
  const grid = svg("g", { class: "axis" });
  drawing.append(grid);
  drawing.append(svg("text", { x: side, y: 12, class: "unit" }, `${unit}${axis.log ? ", logarithmic scale" : ""}`));
  let y = 40;
  for (const group of groups) {
    if (narrow) y += 18;
    drawing.append(svg("text", { x: narrow ? 0 : side - 10, y: narrow ? y - 5 : y + 12, class: narrow ? "group" : "group end" }, clipped(group.name, narrow ? 44 : 32)));
    for (const bar of group.bars) {
      const long = Math.max(2, scale(bar.value));
      drawing.append(svg("rect", { x: side, y, width: long, height: BAR, rx: 2, class: bar.hatched ? "bar hatched" : "bar" }, svg("title", {}, `${group.name}: ${bar.full}`)));
      const label = clipped(bar.label, Math.max(12, Math.floor((width - side - long - 12) / 6.6)));
      drawing.append(svg("text", { x: side + long + 6, y: y + 12 }, label));
      y += STEP;
    }
    y += 8;
  }
  for (const mark of axis.marks) {
    const x = side + scale(mark);
    grid.append(svg("line", { x1: x, x2: x, y1: 34, y2: y }), svg("text", { x, y: 29, class: scale(mark) > 8 ? "middle" : "" }, short(mark)));
  }
  drawing.setAttribute("height", y + 4);
  drawing.setAttribute("viewBox", `0 0 ${width} ${y + 4}`);
  return drawing;
}

function chart(title, unit, note, groups, heads, width) {
  const filled = groups.filter((group) => group.bars.length);
  if (!filled.length) return [el("h2", {}, title), el("p", { class: "empty" }, "Nothing here has such a number: clear a filter.")];
  const rows = filled.flatMap((group) => group.bars.map((bar) => [group.name, ...bar.cells]));
  const asTable = el("details", {}, el("summary", {}, "As a table"), table(title, heads, rows));
  return [el("h2", {}, title), el("p", { class: "note" }, note), bars(title, unit, filled, width), asTable];
}

/** Cells that went through, where a backend was passed only if none went through without. */
function served(cells, key) {
  const found = new Map();
  for (const cell of cells) {
    const plain = get(cell, "backend") === "default";
    const old = found.get(key(cell));
    if (!old || (plain && get(old, "backend") !== "default")) found.set(key(cell), cell);
  }
  return found;
}

const usable = (cell) => get(cell, "verdict") === "ok" && get(cell, "kv_bytes_per_token") > 0 && !get(cell, "row");

function perTokenGroups(where, dtype) {
  const cells = data.cells.filter(
    (cell) => usable(cell) && place(cell) === where && (!dtype || get(cell, "kv_cache_dtype") === dtype) && matches(cell),
  );
  const groups = new Map(unique(cells.map((cell) => get(cell, "model"))).map((model) => [model, new Map()]));
  for (const cell of served(cells, (one) => `${get(one, "model")}\n${get(one, "kv_cache_dtype")}`).values()) {
    const values = groups.get(get(cell, "model"));
    const bytes = get(cell, "kv_bytes_per_token");
    values.set(bytes, [...(values.get(bytes) || []), get(cell, "kv_cache_dtype")]);
  }
  return [...groups].map(([name, values]) => ({
    name,
    bars: [...values].sort((a, b) => b[0] - a[0]).map(([value, names]) => {
      const full = `${number(value)} B  ${names.join(", ")}`;
      return { value, label: full, full, cells: [names.join(", "), number(value)] };
    }),
  }));
}

function fitGroups(asked, engine) {
  const cells = data.cells.filter(
    (cell) => get(cell, "capacity") && get(cell, "kv_cache_dtype") === asked && get(cell, "engine") === engine && usable(cell) && matches(cell),
  );
  const groups = new Map();
  for (const cell of served(cells, (one) => `${get(one, "model")}\n${place(one)}`).values()) {
    const tokens = get(cell, "capacity").tokens;
    const device = get(cell, "device");
    const memory = get(cell, "memory");
    const hatched = Boolean(memory && !memory.weights_fit);
    const bar = { value: tokens, hatched, cells: [device, number(tokens), hatched ? "no" : "yes"] };
    bar.full = bar.label = `${number(tokens)}${hatched ? "*" : ""}  ${device}`;
    groups.set(get(cell, "model"), [...(groups.get(get(cell, "model")) || []), bar]);
  }
  return [...groups].map(([name, of]) => ({ name, bars: of }));
}

function choice(label, key, values, chosen, names = values) {
  const select = el("select", { id: `chart-${key}` });
  values.forEach((value, index) => select.append(el("option", { value, selected: value === chosen }, names[index])));
  select.addEventListener("change", () => {
    state.chart[key] = select.value;
    writeHash();
    showCharts();
  });
  return el("label", { class: "pick" }, `${label} `, select);
}

/** The value that was chosen, where there is such a one, else another. */
const chosenOf = (key, values, other) => (values.includes(state.chart[key]) ? state.chart[key] : other);

function showCharts() {
  // As the style sheet has it: side by side where there is room for both.
  const whole = $("main").clientWidth - 32;
  const width = Math.max(280, Math.min(1240, whole >= 1700 ? Math.floor((whole - 48) / 2) : whole));
  const places = facets.map((facet) => facet.key);
  const matching = data.cells.filter((cell) => matches(cell));
  const where = chosenOf("place", places, matching.length ? place(matching[0]) : places[0]);
  const dtypes = unique(data.cells.map((cell) => get(cell, "kv_cache_dtype")));
  const dtype = chosenOf("dtype", dtypes, "");
  const asked = chosenOf("asked", dtypes, dtypes[0]);
  const versions = unique(facets.map((facet) => facet.version));
  const engine = chosenOf("engine", versions, versions[versions.length - 1]);
  const scale = chosenOf("scale", ["linear", "log"], "");
  const scales = () => choice("Scale", "scale", ["", "linear", "log"], scale, ["as the range wants", "linear", "logarithmic"]);
  const picks = (...of) => el("div", { class: "picks" }, of.filter(Boolean));
  const first = chart(
    "KV bytes per token, by model and kv_cache_dtype",
    "bytes per token",
    "What one more token of context costs at full blocks, over all layers that keep every token, of cells that are ok. dtypes that cost the same share a bar. Default backend, or another where the default does not serve.",
    where === undefined ? [] : perTokenGroups(where, dtype),
    ["model", "kv_cache_dtype", "bytes per token"],
    width,
  );
  const second = chart(
    "Tokens that fit, by model and device",
    "tokens",
    "Where each request has the longest context that was planned, as vLLM computes it. Hatched and *: the weights do not fit the device; planned as if they lay elsewhere.",
    asked === undefined ? [] : fitGroups(asked, engine),
    ["model", "device", "tokens", "weights fit"],
    width,
  );
  first.splice(2, 0, picks(
    places.length > 1 && choice("Device and engine", "place", places, where, facets.map((facet) => facet.title)),
    dtypes.length > 1 && choice("kv_cache_dtype", "dtype", ["", ...dtypes], dtype, ["each", ...dtypes]),
    scales(),
  ));
  second.splice(2, 0, picks(
    versions.length > 1 && choice("Engine", "engine", versions, engine, versions.map((version) => `vLLM ${version}`)),
    dtypes.length > 1 && choice("kv_cache_dtype", "asked", dtypes, asked),
  ));
  // The choice that was just made keeps the focus.
  const focused = document.activeElement && document.activeElement.id;
  $("charts").replaceChildren(el("section", { class: "chart" }, first), el("section", { class: "chart" }, second));
  if (/^chart-/.test(focused)) $(focused)?.focus();
}
