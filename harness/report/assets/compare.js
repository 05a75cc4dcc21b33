// The same case on the other devices and with the other engines of the run.
const places = new Map();

/** All cells of the case of `cell`. */
function alike(cell) {
  if (!places.size) {
    for (const one of data.cells) {
      const name = get(one, "case");
      if (!places.has(name)) places.set(name, []);
      places.get(name).push(one);
    }
  }
  return places.get(get(cell, "case"));
}

const FACTS = [
  ["verdict", (cell) => get(cell, "verdict")],
  ["backend", (cell) => (get(cell, "resolved") || {}).selected],
  ["dtype", resolved],
  ["page", (cell) => (get(cell, "page") === null ? null : `${number(get(cell, "page"))} B`)],
];

/** In what `other` differs, in words; empty where in nothing. What one of them never got to is left out. */
function differs(cell, other) {
  const words = [];
  for (const [name, of] of FACTS) {
    const [here, there] = [of(cell), of(other)];
    if (here !== there && here && there) words.push(`${name} ${there}, here ${here}`);
  }
  return words.join("; ");
}

function inWords(cell) {
  const groups = new Map();
  for (const other of alike(cell)) {
    const engine = get(other, "engine") !== get(cell, "engine");
    const device = get(other, "device") !== get(cell, "device");
    const words = engine === device ? "" : differs(cell, other);
    if (!words) continue;
    const key = `${engine} ${words}`;
    if (!groups.has(key)) groups.set(key, { words, before: engine ? "with vLLM" : "on", where: [] });
    groups.get(key).where.push(get(other, engine ? "engine" : "device"));
  }
  return [...groups.values()].map(({ words, before, where }) => el("li", {}, el("b", {}, `${before} ${where.join(", ")}`), `: ${words}`));
}

/** A table of devices and engines that leads to the same case there. */
function elsewhere(cell) {
  const cells = alike(cell);
  if (cells.length < 2) return null;
  const versions = unique(facets.map((facet) => facet.version)).filter((version) => cells.some((one) => get(one, "engine") === version));
  const specs = unique(facets.map((facet) => facet.spec)).filter((spec) => cells.some((one) => get(one, "device") === spec));
  const rows = specs.map((spec) => [
    el("b", {}, spec),
    ...versions.map((version) => {
      const other = cells.find((one) => get(one, "device") === spec && get(one, "engine") === version);
      if (!other) return "–";
      const page = get(other, "page") === null ? "" : ` ${number(get(other, "page"))}`;
      const name = filterVerdict(other) === "known" ? `${get(other, "verdict")}, known` : get(other, "verdict");
      if (other === cell) return el("span", { class: `tag here ${tone(other)}`, "aria-current": "true" }, `${glyph(get(other, "verdict"))} ${name}${page}`);
      const button = el("button", { type: "button", class: `tag ${tone(other)}` }, `${glyph(get(other, "verdict"))} ${name}${page}`);
      button.addEventListener("click", () => openCell(other));
      return button;
    }),
  ]);
  const words = inWords(cell);
  return [
    words.length ? el("ul", {}, words) : el("p", {}, "The same wherever it came to something."),
    table("The same case elsewhere", ["device", ...versions.map((version) => `vLLM ${version}`)], rows),
  ];
}

/** What changed since another engine or the baseline, a line each. */
function changesOf(cell) {
  const value = (one) => (Array.isArray(one) ? one.map((part) => (typeof part === "number" ? number(part) : part)).join(", ") : typeof one === "number" ? number(one) : (one ?? "none"));
  const lines = (get(cell, "changes") || []).map((one) =>
    el("li", {},
      el("b", {}, `since ${one.since}${one.kind ? `: ${one.kind}` : ""}`),
      `, ${one.what}${one.part ? ` of ${one.part}` : ""} ${value(one.old)} → ${value(one.new)}`,
      one.reason ? ` (${clipped(one.reason, 300)})` : ""),
  );
  return lines.length ? el("ul", {}, lines) : null;
}
