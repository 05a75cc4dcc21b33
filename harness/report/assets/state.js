// What is shown: filters, search, view and the open cell, all of it held in the URL's hash.
const FILTERS = [
  ["model", "Model"],
  ["backend", "Backend"],
  ["kv_cache_dtype", "kv_cache_dtype"],
  ["device", "Device"],
  ["engine", "Engine"],
  ["news", "News"],
];
const state = { chosen: {}, differences: false, search: "", view: "matrix", cell: "", chart: {} };
const CHART_KEYS = ["place", "dtype", "asked", "engine", "scale"];

/** Read the state from the hash; what it does not know is left out. */
function readHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  state.chosen = {};
  for (const name of [...FILTERS.map(([key]) => key), "verdict"]) {
    const values = given.getAll(name).filter((value) => value !== "");
    if (values.length) state.chosen[name] = new Set(values);
  }
  state.differences = given.get("differences") === "1";
  state.search = given.get("search") || "";
  state.view = given.get("view") === "charts" ? "charts" : "matrix";
  state.cell = given.get("cell") || "";
  state.chart = {};
  for (const key of CHART_KEYS) if (given.get(key)) state.chart[key] = given.get(key);
}

/** Write the state to the hash; `step` makes it a step that Back undoes. */
function writeHash(step = false) {
  const hash = new URLSearchParams();
  for (const [name, values] of Object.entries(state.chosen)) {
    for (const value of values) hash.append(name, value);
  }
  if (state.differences) hash.set("differences", "1");
  if (state.search) hash.set("search", state.search);
  if (state.view !== "matrix") hash.set("view", state.view);
  for (const key of CHART_KEYS) if (state.chart[key]) hash.set(key, state.chart[key]);
  if (state.cell) hash.set("cell", state.cell);
  const text = hash.toString();
  if (text === location.hash.slice(1)) return;
  const address = text ? `#${text}` : location.pathname + location.search;
  if (step) history.pushState(null, "", address);
  else history.replaceState(null, "", address);
}

/** The verdict by which a cell is filtered and counted: a known failure is `known`, and one that is
 * no longer as known.yaml has it is `stale`, which fails the run, whatever their verdict. */
const filterVerdict = (cell) => (get(cell, "stale") ? "stale" : get(cell, "known") ? "known" : get(cell, "verdict"));
/** The sign of such a verdict. */
const signOf = (name) => ({ known: "k", stale: "s" })[name] || glyph(name);

/** True where the filters and the search let a cell through; `less` is a filter to leave out. */
function matches(cell, less = "") {
  for (const [name, values] of Object.entries(state.chosen)) {
    if (name === less) continue;
    if (name === "news") {
      if (!get(cell, name).some((word) => values.has(word))) return false;
    } else if (!values.has(name === "verdict" ? filterVerdict(cell) : get(cell, name))) return false;
  }
  if (state.differences && !isDifferent(cell)) return false;
  if (!state.search) return true;
  const text = searchable(cell);
  return state.search.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function toggle(name, value, on) {
  const values = state.chosen[name] || new Set();
  if (on) values.add(value);
  else values.delete(value);
  if (values.size) state.chosen[name] = values;
  else delete state.chosen[name];
}

/** What there is to choose of a filter, in the order of the run. */
function valuesOf(name) {
  if (name !== "news") return unique(data.cells.map((cell) => get(cell, name)));
  const found = new Set(data.cells.flatMap((cell) => get(cell, "news")));
  return data.news.filter((word) => found.has(word));
}

/** The controls of the filters, made once. */
function buildFilters(changed) {
  const boxes = $("filters");
  for (const [name, label] of FILTERS) {
    const values = valuesOf(name);
    // A choice of one is none.
    if (values.length < (name === "news" ? 1 : 2)) continue;
    const list = el("div", { class: "choices" });
    for (const value of values) {
      const box = el("input", { type: "checkbox", "data-filter": name, value });
      box.addEventListener("change", () => {
        toggle(name, value, box.checked);
        changed();
      });
      list.append(el("label", {}, box, " ", String(value)));
    }
    const chosen = el("span", { class: "chosen", "data-chosen": name });
    const summary = el("summary", {}, label, " ", chosen);
    boxes.append(el("details", { class: "filter", name: "filter" }, summary, list));
  }
  const several = data.cells.some(isDifferent);
  const box = el("input", { type: "checkbox", id: "differences", disabled: !several });
  box.addEventListener("change", () => {
    state.differences = box.checked;
    changed();
  });
  const why = several
    ? "Cells that did not become the same on every device with every engine, or that changed since the baseline"
    : "No cell differs between devices or engines of this run";
  boxes.append(el("label", { class: "only", title: why }, box, " only differences"));
  const clear = el("button", { type: "button", id: "clear" }, "Clear");
  clear.addEventListener("click", () => {
    Object.assign(state, { chosen: {}, differences: false, search: "" });
    changed();
  });
  boxes.append(clear);
  buildVerdicts(changed);
}

const TONES = { ok: "good", rejected: "dim", skipped: "skip", known: "known" };
/** What fails stands first. */
const VERDICT_ORDER = [...Object.keys(data.verdicts).filter((name) => !(name in TONES)), "stale", "known", "ok", "rejected", "skipped"];
const MEANINGS = { known: "failures that are known, with a link", stale: "known entries that no longer hold: each fails the run" };

function buildVerdicts(changed) {
  const found = new Set(data.cells.map(filterVerdict));
  for (const name of VERDICT_ORDER.filter((verdict) => found.has(verdict))) {
    const toneOf = TONES[name] || "bad";
    const meaning = MEANINGS[name] || data.verdicts[name][1];
    const button = el(
      "button",
      { type: "button", class: `verdict ${toneOf}`, "data-verdict": name, "aria-pressed": "false", title: meaning },
      el("span", { class: "g", "aria-hidden": "true" }, signOf(name)),
      ` ${name} `,
      el("b", {}),
    );
    button.addEventListener("click", () => {
      toggle("verdict", name, button.getAttribute("aria-pressed") !== "true");
      changed();
    });
    $("verdicts").append(button);
  }
}

/** Make the controls show the state. */
function showFilters() {
  let active = state.differences ? 1 : 0;
  for (const box of document.querySelectorAll("[data-filter]")) {
    const values = state.chosen[box.dataset.filter];
    box.checked = Boolean(values && values.has(box.value));
  }
  for (const button of document.querySelectorAll("[data-news]")) {
    button.setAttribute("aria-pressed", String(Boolean(state.chosen.news && state.chosen.news.has(button.dataset.news))));
  }
  for (const span of document.querySelectorAll("[data-chosen]")) {
    const values = state.chosen[span.dataset.chosen];
    span.textContent = values ? (values.size === 1 ? [...values][0] : values.size) : "";
    active += values ? 1 : 0;
  }
  const counts = {};
  for (const cell of data.cells) {
    if (matches(cell, "verdict")) counts[filterVerdict(cell)] = (counts[filterVerdict(cell)] || 0) + 1;
  }
  for (const button of document.querySelectorAll("[data-verdict]")) {
    const values = state.chosen.verdict;
    button.setAttribute("aria-pressed", String(Boolean(values && values.has(button.dataset.verdict))));
    button.querySelector("b").textContent = number(counts[button.dataset.verdict] || 0);
  }
  $("differences").checked = state.differences;
  if ($("search").value !== state.search) $("search").value = state.search;
  $("active").textContent = active ? ` (${active})` : "";
  $("clear").disabled = !active && !state.chosen.verdict && !state.search;
}
