// Where one is: the verdicts of each device with each engine, and what is news since the baseline.
/** How many of each verdict, what fails first: [element, ...]; in words for a screen reader. */
function tallyOf(tally, columns = null) {
  const blank = () => el("span", { class: "n" });
  return VERDICT_ORDER.filter((name) => (columns ? columns.has(name) : tally[name])).map((name) => !tally[name] ? blank() :
    el("span", { class: `n ${TONES[name] || "bad"}`, title: `${number(tally[name])} ${name}` },
      el("span", { class: "g", "aria-hidden": "true" }, signOf(name)),
      el("span", { class: "vh" }, ` ${name} `), number(tally[name]), el("span", { class: "vh" }, ", ")),
  );
}

/** A table of devices and engines that leads to their facets; nothing where there is one alone. */
function showOverview() {
  const seen = facets.filter((facet) => facet.shown);
  $("overview").hidden = facets.length < 2 || !seen.length;
  if ($("overview").hidden) return;
  const versions = unique(facets.map((facet) => facet.version)).filter((version) => seen.some((facet) => facet.version === version));
  // What none of an engine's tables has takes no room below it.
  const columns = Object.fromEntries(
    versions.map((version) => [version, new Set(seen.filter((facet) => facet.version === version).flatMap((facet) => Object.keys(facet.tally)))]),
  );
  const rows = unique(seen.map((facet) => facet.spec)).map((spec) => {
    const cells = versions.map((version) => {
      const facet = seen.find((one) => one.spec === spec && one.version === version);
      if (!facet) return el("td", { class: "none" }, el("span", { class: "vh" }, "none"));
      const button = el("button", { type: "button", class: "lead" }, el("span", { class: "vh" }, `${facet.title}: `), tallyOf(facet.tally, columns[version]));
      button.addEventListener("click", () => goTo(facet));
      return el("td", {}, button);
    });
    const device = devices[spec] || {};
    const about = [device.capability && `SM${device.capability.join("")}`, device.memory_bytes && size(device.memory_bytes)];
    const head = el("th", { scope: "row" }, el("b", {}, spec), " ", el("small", {}, about.filter(Boolean).join(" · ")));
    return el("tr", {}, head, cells);
  });
  const heads = ["device", ...versions.map((version) => `vLLM ${version}`)];
  $("overview-table").replaceChildren(
    el("caption", { class: "vh" }, "Verdicts of each device with each engine; each leads to its table"),
    el("thead", {}, el("tr", {}, heads.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, rows),
  );
}

const GONE = 200; // Cells that vanished, of which the page lists no more.

/** Cells that this run lacks, as a list that opens; nothing where there are none. */
function missing(cells, what) {
  if (!cells.length) return [];
  const items = cells.slice(0, GONE).map(([id, device, engine, was]) => el("li", {}, `${id} on ${device} with vLLM ${engine}${was ? `: was ${was}` : ""}`));
  if (cells.length > GONE) items.push(el("li", {}, `and ${number(cells.length - GONE)} more`));
  return [el("details", {}, el("summary", {}, `${number(cells.length)} ${what}, which is no pass`), el("ul", {}, items))];
}

/** What is news since the baseline and the history, once: each kind a filter. */
function buildBaseline(changed) {
  const { baseline } = data;
  const lost = data.history.missing.map((one) => [one.id, one.device, one.engine]);
  const parts = missing(lost, "missing: earlier runs had them");
  if (baseline) {
    const kinds = Object.entries(baseline.counts).filter(([kind, count]) => count && kind !== "vanished");
    const buttons = kinds.map(([kind, count]) => {
      const word = `baseline: ${kind}`;
      const button = el("button", { type: "button", class: "verdict", "data-news": word, "aria-pressed": "false" }, `${kind} `, el("b", {}, number(count)));
      button.addEventListener("click", () => {
        toggle("news", word, button.getAttribute("aria-pressed") !== "true");
        changed();
      });
      return button;
    });
    const line = el("div", { class: "news" }, `Since the baseline (${number(baseline.compared)} cells in both): `, buttons.length ? buttons : "nothing");
    parts.unshift(line, ...baseline.notes.map((note) => el("p", { class: "note" }, note)), ...missing(baseline.vanished, "vanished: this run has no such cell"));
  }
  $("baseline").append(...parts);
  $("baseline").hidden = !parts.length;
}
