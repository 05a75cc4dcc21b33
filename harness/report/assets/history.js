// What a cell was in earlier runs: a strip of signs, oldest first.
const runs = (data.history && data.history.runs) || [];

/** The verdict of one run in words, its sign, and the class that colours it. */
function pastOf(verdict) {
  if (verdict === null) return { words: "no such cell in that run", sign: "□", tone: "absent" };
  const name = verdict.split(" ")[0];
  if (verdict.endsWith("(known)")) return { words: verdict, sign: "k", tone: "known" };
  const tones = { ok: "good", rejected: "dim", skipped: "skip", notrun: "absent", infra: "absent" };
  const stale = verdict !== name;
  return { words: verdict, sign: glyph(name), tone: stale ? "bad" : tones[name] || "bad" };
}

/** The strip of a cell, and since when it is what it is; null where the run knew no earlier one. */
function historyOf(cell) {
  const past = get(cell, "history");
  if (!past) return null;
  const items = past.strip.map((verdict, index) => {
    const one = pastOf(verdict);
    const run = runs[index] || { engines: [] };
    const when = index === past.strip.length - 1 ? "this run" : run.started || "a run without a date";
    const built = run.engines.map((engine) => `vLLM ${engine.version}${engine.commit ? ` (${engine.commit.slice(0, 9)})` : ""}`);
    const text = [when, built.join(", "), one.words].filter(Boolean).join(": ");
    const sign = el("span", { "aria-hidden": "true" }, one.sign);
    return el("li", { class: `past ${one.tone}`, title: text }, sign, el("span", { class: "vh" }, text));
  });
  return [
    el("ol", { class: "strip", "aria-label": "Earlier runs, oldest first" }, items),
    el("p", {}, past.flaky ? el("b", { class: "tag bad" }, "flaky: one engine gave both") : "", past.flaky ? " " : "", past.since),
  ];
}
