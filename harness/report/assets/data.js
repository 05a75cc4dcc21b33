// The data of the page, and how its values are written.
const data = JSON.parse(document.getElementById("data").textContent);
const at = Object.fromEntries(data.fields.map((name, index) => [name, index]));
const $ = (id) => document.getElementById(id);

/** A cell's value of one field. */
const get = (cell, name) => (name in at ? data.pool[cell[at[name]]] : null);

const unique = (values) => [...new Set(values)];
const number = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en-US"));

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
/** A text fit to stand in HTML, in an attribute too. */
const esc = (text) => String(text).replace(/[&<>"']/g, (c) => ESCAPES[c]);

/** `esc`, and lines may break behind an underscore. */
const breakable = (text) => esc(text).replace(/_/g, "_<wbr>");

const clipped = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
/** Bytes for people: `140.4 GiB`. */
function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  let value = bytes;
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? value : value.toFixed(1)} ${UNITS[unit]}`;
}

/** An element with attributes and children; texts become text nodes, never HTML. */
function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

const devices = Object.fromEntries(data.devices.map((device) => [device.spec, device]));
const engines = Object.fromEntries(data.engines.map((engine) => [engine.version, engine]));

const isVirtual = (cell) => {
  const device = devices[get(cell, "device")];
  return device ? device.kind === "virtual" : String(get(cell, "device")).startsWith("virtual");
};

/** `s` for a known entry that no longer holds, `k` for a known failure, else empty. */
const flag = (cell) => (get(cell, "stale") ? "s" : get(cell, "known") ? "k" : "");

/** True where one engine gave both verdicts in runs of the history. */
const isFlaky = (cell) => Boolean((get(cell, "history") || {}).flaky);

const NO_DIFFERENCE = new Set(["flaky", "baseline: still failing"]);
/** True where a cell became something else elsewhere in the run, or since the baseline. */
const isDifferent = (cell) => get(cell, "news").some((word) => !NO_DIFFERENCE.has(word));

/** The class that colours a cell. */
function tone(cell) {
  const verdict = get(cell, "verdict");
  if (get(cell, "stale")) return "bad";
  if (get(cell, "known")) return "known";
  return { ok: "good", rejected: "dim", skipped: "skip" }[verdict] || "bad";
}

const glyph = (verdict) => (data.verdicts[verdict] || ["?"])[0];
const resolved = (cell) => (get(cell, "resolved") || {}).kv_cache_dtype || null;
const rowName = (cell) => [get(cell, "backend"), get(cell, "row")].filter(Boolean).join(" ");
const place = (cell) => `${get(cell, "device")}\n${get(cell, "engine")}`;

/** What a cell is found by, lower case; made when first asked for. */
const texts = new Map();
function searchable(cell) {
  if (!texts.has(cell)) {
    const error = get(cell, "error") || {};
    const words = ["id", "model", "backend", "kv_cache_dtype", "device", "engine", "verdict", "reason", "known"]
      .map((name) => get(cell, name) || "")
      .concat(resolved(cell) || "", (get(cell, "resolved") || {}).selected || "", get(cell, "page") || "")
      .concat(error.type || "", error.where || "", get(cell, "remarks") || []);
    texts.set(cell, clipped(words.join(" "), 4000).toLowerCase());
  }
  return texts.get(cell);
}
