// The detail of one cell: all that is known of it.
const BYTES = {
  uint8: 1, int8: 1, float8_e4m3fn: 1, float8_e5m2: 1,
  float16: 2, bfloat16: 2, int16: 2, float32: 4, int32: 4, float64: 8, int64: 8,
};

function part(title, ...children) {
  const kept = children.flat(Infinity).filter(Boolean);
  return kept.length ? el("section", {}, el("h3", {}, title), kept) : null;
}

/** Labelled values; those without a value are left out. */
function facts(pairs) {
  const rows = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return rows.length ? el("dl", {}, rows.map(([label, value]) => [el("dt", {}, label), el("dd", {}, value)])) : null;
}

function table(caption, heads, rows) {
  const head = el("tr", {}, heads.map((name) => el("th", { scope: "col" }, name)));
  const body = rows.map((row) => el("tr", {}, row.map((value) => el("td", {}, value))));
  const made = el("table", {}, el("caption", { class: "vh" }, caption), el("thead", {}, head), el("tbody", {}, body));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, made);
}

/** How a page's bytes come about, by the numbers that are known; each equation holds. */
function arithmetic(kv) {
  const lines = [];
  const width = BYTES[kv.tensor_dtype];
  const sizes = (kv.shape || []).filter((length) => length !== -1);
  if (width && sizes.length) {
    const bytes = sizes.reduce((product, length) => product * length, width);
    const text = `${sizes.join(" × ")} × ${width} B`;
    const times = kv.content_bytes / bytes;
    if (times === 1) lines.push(`${text} = ${number(kv.content_bytes)}`);
    else if (Number.isInteger(times)) lines.push(`${times} kernel blocks × ${text} = ${number(kv.content_bytes)}`);
    else lines.push(`content ${number(kv.content_bytes)}`);
  } else lines.push(`content ${number(kv.content_bytes)}`);
  const padding = kv.page_size_bytes - kv.content_bytes;
  if (padding > 0) {
    const times = kv.alignment ? kv.page_size_bytes / kv.alignment : 0;
    const aligned = times && kv.page_size_bytes - kv.alignment < kv.content_bytes;
    const why = aligned && Number.isInteger(times) ? `, ${number(times)} × ${kv.alignment}` : "";
    lines.push(`+ ${number(padding)} padding${why}`);
  }
  return lines.map((line) => el("span", {}, line));
}

function pages(cell) {
  const rows = (get(cell, "kv") || []).map((kv) => [
    `${kv.kind}${kv.draft ? " (draft)" : ""}`,
    kv.role,
    number(kv.layers),
    kv.compress_ratio > 1 ? `${number(kv.block_size)} (${kv.compress_ratio} tokens a state)` : number(kv.block_size),
    el("b", {}, number(kv.page_size_bytes)),
    el("span", { class: "sums" }, arithmetic(kv)),
    `${kv.tensor_dtype || kv.dtype || "–"}${kv.cache_dtype ? `, ${kv.cache_dtype}` : ""}`,
    kv.backend || "–",
    kv.window ? number(kv.window) : kv.grows ? "all" : "state",
  ]);
  if (!rows.length) return null;
  const heads = ["kind", "role", "layers", "block, tokens", "page, B", "arithmetic", "dtype", "backend", "keeps"];
  return [table("KV cache, by kind of layer", heads, rows), perToken(cell)];
}

function perToken(cell) {
  const given = get(cell, "kv_bytes_per_token");
  const growing = (get(cell, "kv") || []).filter((kv) => kv.grows);
  if (given === null || !growing.length) return null;
  const terms = growing.map((kv) => `${kv.layers} × ${number(kv.page_size_bytes)} / ${number(kv.block_size)}`);
  const sum = growing.reduce((total, kv) => total + (kv.layers * kv.page_size_bytes) / kv.block_size, 0);
  const equal = Math.abs(sum - given) < 1;
  return el("p", { class: "sum" }, equal ? `Per token: ${terms.join(" + ")} = ` : "Per token: ", el("b", {}, `${number(given)} B`));
}

function selection(cell) {
  const became = get(cell, "resolved") || {};
  const candidates = get(cell, "candidates") || [];
  const rows = candidates.map((one) => [
    `${one.selected ? "✓ " : ""}${one.backend}`,
    one.selected ? "selected" : one.reasons.length ? "refused" : "could have served",
    one.reasons.join("; "),
    one.asked || "",
  ]);
  const passed = get(cell, "backend") !== "default";
  const why = passed ? "passed" : candidates.length ? "the first that could serve, in vLLM's order" : "the model's own choice, or none was recorded";
  return [
    facts([
      ["selected", became.selected ? `${became.selected} (${why})` : null],
      ["serving", (became.backends || []).join(", ")],
    ]),
    rows.length ? table("Candidates, in vLLM's order", ["candidate", "", "reasons", "layers asked"], rows) : null,
  ];
}

function verdictPart(cell) {
  const name = get(cell, "verdict");
  const link = get(cell, "known");
  const remarks = (get(cell, "remarks") || []).map((word) => (data.remarks[word] ? `${word}: ${data.remarks[word]}` : word));
  return part(
    "Verdict",
    el("p", {}, el("span", { class: `tag ${tone(cell)}` }, `${glyph(name)} ${name}`), ` ${(data.verdicts[name] || ["", ""])[1]}`),
    el("pre", { class: "reason" }, get(cell, "reason") || "no reason given"),
    facts([
      ["expected", get(cell, "expected")],
      ["confirmed by", (get(cell, "vouched") || []).join(", ")],
      ["known as", /^https:\/\//.test(link || "") ? el("a", { href: link, rel: "noreferrer noopener", target: "_blank" }, link) : link],
      ["stale", get(cell, "stale")],
      ["remarks", remarks.join("; ")],
    ]),
  );
}

function capacityPart(cell) {
  const capacity = get(cell, "capacity");
  const memory = get(cell, "memory");
  const given = capacity && [
    ["tokens that fit", number(capacity.tokens)],
    ["requests that fit", `${number(Math.round(capacity.concurrency * 100) / 100)} of ${number(capacity.max_model_len)} tokens`],
    ["one request", `${number(capacity.request_bytes)} B (${size(capacity.request_bytes)})`],
    ["memory share", `gpu_memory_utilization ${capacity.gpu_memory_utilization}`],
  ];
  const rows = memory && [
    ["device memory", size(memory.total_bytes)],
    ["weights", `${size(memory.weights_bytes)}${memory.weights_fit ? "" : ": they do not fit, planned as if they lay elsewhere"}`],
    ["for the KV cache", size(memory.available_bytes)],
  ];
  return part("Capacity", facts([...(given || []), ["blocks", get(cell, "num_blocks") && number(get(cell, "num_blocks"))], ...(rows || [])]));
}

function lastPart(cell) {
  const seconds = Object.entries(get(cell, "seconds") || {}).map(([stage, value]) => `${stage} ${value} s`);
  const settings = Object.entries(get(cell, "settings") || {}).map(([name, value]) => `${name}=${value}`);
  const engine = engines[get(cell, "engine")] || {};
  return part(
    "Where it ran",
    facts([
      ["stage", get(cell, "stage")],
      ["end", get(cell, "end") === "finished" ? null : get(cell, "end")],
      ["exit code", get(cell, "exit_code")],
      ["seconds", seconds.join(", ")],
      ["engine", ["version", "commit", "torch", "cuda", "flashinfer", "transformers"].filter((key) => engine[key]).map((key) => `${key === "version" ? "vLLM" : key} ${engine[key]}`).join(", ")],
      ["settings", settings.join(" ")],
      ["needs", get(cell, "needs_bytes") && size(get(cell, "needs_bytes"))],
      ["leaked", get(cell, "leaked_bytes") && size(get(cell, "leaked_bytes"))],
    ]),
  );
}

function detailOf(cell) {
  const became = get(cell, "resolved") || {};
  const error = get(cell, "error");
  const declared = (get(cell, "declared") || []).map((one) => [one.backend, one.reasons.length ? one.reasons.join("; ") : "supported", one.kv_cache_dtypes.join(", ")]);
  const groups = (get(cell, "groups") || []).map((one) => [one.kind, number(one.layers), number(one.block_size), number(one.page_size_bytes)]);
  const log = get(cell, "log") || [];
  return [
    verdictPart(cell),
    part("Changed", changesOf(cell)),
    part("History", historyOf(cell)),
    part("Elsewhere in this run", elsewhere(cell)),
    part("Requested", facts([
      ["model", get(cell, "model")],
      ["backend", get(cell, "backend") === "default" ? "default (not passed)" : get(cell, "backend")],
      ["kv_cache_dtype", get(cell, "kv_cache_dtype") === "unset" ? "unset (not passed)" : get(cell, "kv_cache_dtype")],
      ["block_size", get(cell, "block_size")],
      ["tensor parallel", get(cell, "tensor_parallel_size") > 1 ? get(cell, "tensor_parallel_size") : null],
    ])),
    part("Resolved", facts([
      ["kv_cache_dtype", became.kv_cache_dtype],
      ["stored as", became.storage_dtype],
      ["cache_config", became.cache_config],
    ])),
    part("Backend", selection(cell)),
    part("Error", error && [
      el("p", {}, el("b", {}, error.type), error.where ? ` in ${error.where}` : ""),
      el("pre", { id: "message", tabindex: "0" }, error.message),
    ]),
    part("Pages", pages(cell)),
    part("Groups", groups.length ? table("KV cache groups", ["kind", "layers", "block, tokens", "page, B"], groups) : null),
    capacityPart(cell),
    part("Declared by the backends", declared.length ? table("What the backends declare", ["backend", "declares", "its dtypes"], declared) : null),
    part("Log of the KV cache", log.length ? el("pre", { tabindex: "0" }, log.join("\n")) : null),
    part("Last output", get(cell, "tail") ? el("pre", { id: "tail", tabindex: "0" }, get(cell, "tail")) : null),
    lastPart(cell),
    part("Reproduce", reproduction(cell)),
  ].filter(Boolean);
}

function reproduction(cell) {
  const command = el("pre", { id: "command", tabindex: "0" }, get(cell, "reproduce"));
  const copy = el("button", { type: "button" }, "Copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(get(cell, "reproduce"));
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(command);
    }
  });
  return el("div", { class: "copy" }, command, copy);
}

function showDetail(cell) {
  const dialog = $("detail");
  const virtual = isVirtual(cell);
  const kind = el("span", { class: `kind ${virtual ? "virtual" : "measured"}` });
  kind.textContent = virtual ? "virtual: planned by vLLM's code, no GPU" : "measured on a real device";
  const close = el("button", { type: "button", class: "close", "aria-label": "Close" }, "×");
  close.addEventListener("click", () => dialog.close());
  const title = el("h2", { id: "detail-title" }, get(cell, "id"));
  const where = el("p", {}, kind, ` ${get(cell, "device")} · vLLM ${get(cell, "engine")}`);
  const content = el("div", { class: "content" }, detailOf(cell));
  dialog.replaceChildren(el("div", { class: "title" }, el("div", {}, title, where), close), content);
  if (!dialog.open) dialog.showModal();
  content.scrollTop = 0;
}
