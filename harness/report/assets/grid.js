// The tables: one for each device and engine, drawn when it comes near the window. All rows of a
// table are there, with their names; the cells of a row come when the row is near the window.
const facets = [];
const ROW = 32; // Pixels; the style sheet has the same.
const AT_ONCE = 600; // Cells that are there before the page has been laid out.
const MARGIN = "600px"; // How far around the window things are drawn.
let current = null; // The cell that Tab leads to.

/** Rows, columns and cells of a facet that the filters let through. */
function layOut(facet) {
  const columns = new Set();
  const models = new Map();
  const tally = {};
  let shown = 0;
  for (const cell of facet.cells) {
    if (!matches(cell)) continue;
    shown += 1;
    const verdict = filterVerdict(cell);
    tally[verdict] = (tally[verdict] || 0) + 1;
    columns.add(get(cell, "kv_cache_dtype"));
    const rows = models.get(get(cell, "model")) || new Map();
    models.set(get(cell, "model"), rows);
    const row = rows.get(rowName(cell)) || new Map();
    rows.set(rowName(cell), row);
    row.set(get(cell, "kv_cache_dtype"), cell);
  }
  facet.columns = facet.order.filter((name) => columns.has(name));
  facet.models = models;
  facet.shown = shown;
  facet.tally = tally;
  // Where each model has one row, the row has the model's name too.
  facet.flat = [...models.values()].every((rows) => rows.size === 1);
  facet.rows = [];
  facet.drawn = false;
}

/** What a screen reader says of a cell. */
function spoken(cell) {
  const parts = [get(cell, "verdict")];
  if (flag(cell)) parts.push(flag(cell) === "k" ? "known failure" : "known entry no longer holds");
  if (isFlaky(cell)) parts.push("flaky: earlier runs differ");
  if (get(cell, "page") !== null) parts.push(`page ${number(get(cell, "page"))} bytes`);
  if (resolved(cell)) parts.push(`resolved ${resolved(cell)}`);
  return parts.join(", ");
}

function cellHtml(cell) {
  if (cell === undefined) return '<td class="none"><span class="vh">none</span></td>';
  const page = get(cell, "page");
  const sign = esc(glyph(get(cell, "verdict"))) + (flag(cell) ? `<sup>${flag(cell)}</sup>` : "");
  const flaky = isFlaky(cell) ? '<span class="f" title="flaky">≈</span>' : "";
  const pages = page === null ? "" : `<span class="p">${number(page)}</span>`;
  const became = resolved(cell) ? `<span class="r">${esc(resolved(cell))}</span>` : "";
  return (
    `<td><button type="button" tabindex="-1" class="c ${tone(cell)}" data-i="${cell.index}" ` +
    `aria-label="${esc(spoken(cell))}"><span class="g">${sign}${flaky}</span>${pages}${became}</button></td>`
  );
}

const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();
/** Pixels of a text of the grid. */
function wide(text, font) {
  const key = `${font}\n${text}`;
  if (!widths.has(key)) {
    pen.font = `${font} ${getComputedStyle(document.body).fontFamily}`;
    widths.set(key, pen.measureText(clipped(text, 60)).width);
  }
  return widths.get(key);
}

/** Pixels of a column: as its cells need, and its head in about two lines. */
function columnWidth(facet, name) {
  const parts = name.split("_").map((part) => wide(`${part}_`, "600 11px"));
  let most = Math.max(...parts, wide(name, "600 11px") / 2, 34);
  for (const rows of facet.models.values()) {
    for (const row of rows.values()) {
      const cell = row.get(name);
      if (!cell) continue;
      if (resolved(cell)) most = Math.max(most, wide(resolved(cell), "10.5px"));
      const page = get(cell, "page");
      if (page !== null) most = Math.max(most, 20 + (flag(cell) ? 6 : 0) + (isFlaky(cell) ? 9 : 0) + wide(number(page), "12px"));
    }
  }
  return Math.ceil(Math.min(most, 112)) + 14;
}

function tableHtml(facet) {
  const span = facet.columns.length;
  const heads = facet.columns.map((name) => `<th scope="col">${breakable(name)}</th>`).join("");
  const html = [
    `<table aria-rowcount="${facet.rows.length + 1 + (facet.flat ? 0 : facet.models.size)}">`,
    `<caption class="vh">${esc(facet.title)}: what the KV cache became</caption>`,
    `<colgroup><col class="corner">${"<col>".repeat(span)}</colgroup>`,
    `<thead><tr aria-rowindex="1"><th scope="col" class="corner">${facet.flat ? "model, backend" : "backend"}</th>${heads}</tr></thead>`,
  ];
  const pending = `<td class="pending" colspan="${span}"></td></tr>`;
  let line = 1;
  if (facet.flat) html.push("<tbody>");
  for (const [model, rows] of facet.models) {
    if (!facet.flat) {
      line += 1;
      html.push(
        `<tbody><tr class="m" aria-rowindex="${line}"><th scope="rowgroup" colspan="${span + 1}">`,
        `<span>${esc(model)}</span></th></tr>`,
      );
    }
    for (const name of rows.keys()) {
      line += 1;
      const label = facet.flat ? `<b>${esc(model)}</b> <small>${breakable(name)}</small>` : breakable(name);
      const full = esc(facet.flat ? `${model}, ${name}` : name);
      html.push(`<tr class="d" aria-rowindex="${line}"><th scope="row" title="${full}"><div>${label}</div></th>`, pending);
    }
    if (!facet.flat) html.push("</tbody>");
  }
  html.push(facet.flat ? "</tbody></table>" : "</table>");
  return html.join("");
}

/** The names of a facet's rows, and the cells of its first. */
function draw(facet) {
  if (facet.drawn || !facet.open || !facet.shown) return;
  facet.drawn = true;
  facet.body.style.minHeight = "";
  facet.rows = [...facet.models.values()].flatMap((rows) => [...rows.values()]);
  facet.body.innerHTML = tableHtml(facet);
  const table = facet.body.firstChild;
  let total = 0;
  [...table.querySelectorAll("col:not(.corner)")].forEach((col, index) => {
    const width = columnWidth(facet, facet.columns[index]);
    col.style.width = `${width}px`;
    total += width;
  });
  table.style.width = `calc(var(--corner) + ${total}px)`;
  let left = AT_ONCE;
  [...table.querySelectorAll("tr.d")].forEach((line, index) => {
    line.cellsOf = facet.rows[index];
    line.facet = facet;
    if (left > 0) fill(line);
    else nearRows.observe(line);
    left -= facet.columns.length;
  });
  if (current === null) markCurrent();
}

/** The cells of one row. */
function fill(line) {
  if (!line.cellsOf) return;
  const row = line.cellsOf;
  line.cellsOf = null;
  nearRows.unobserve(line);
  line.lastChild.remove();
  line.insertAdjacentHTML("beforeend", line.facet.columns.map((name) => cellHtml(row.get(name))).join(""));
}

/** Draw all of a facet now. */
function finish(facet) {
  draw(facet);
  if (facet.drawn) facet.body.querySelectorAll("tr.d").forEach(fill);
}

/** The button of a cell, drawn if need be; null where it is filtered out or its facet is closed. */
function buttonOf(cell) {
  const facet = facets.find((one) => one.cells.includes(cell));
  draw(facet);
  const index = facet.rows.findIndex((row) => row.get(get(cell, "kv_cache_dtype")) === cell);
  if (!facet.drawn || index < 0) return null;
  fill(facet.body.querySelectorAll("tr.d")[index]);
  return facet.body.querySelector(`[data-i="${cell.index}"]`);
}

const nearRows = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) if (entry.isIntersecting) fill(entry.target);
  },
  { root: $("main"), rootMargin: MARGIN },
);
const nearFacets = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target.facet);
  },
  { root: $("main"), rootMargin: MARGIN },
);

/** The sections of all facets, made once: devices in the order of the run, and of each its engines. */
function buildFacets() {
  const groups = new Map();
  data.cells.forEach((cell, index) => {
    cell.index = index;
    if (!groups.has(place(cell))) groups.set(place(cell), []);
    groups.get(place(cell)).push(cell);
  });
  const rank = (list, name) => (list.indexOf(name) + list.length + 1) % (list.length + 1);
  const specs = data.devices.map((device) => device.spec);
  const versions = data.engines.map((engine) => engine.version);
  const order = (key) => {
    const [spec, version] = key.split("\n");
    return rank(specs, spec) * (versions.length + 1) + rank(versions, version);
  };
  for (const key of [...groups.keys()].sort((a, b) => order(a) - order(b))) addFacet(key, groups.get(key));
}

function addFacet(key, cells) {
  const [spec, version] = key.split("\n");
  const device = devices[spec] || {};
  const title = `${spec}, vLLM ${version}`;
  const order = unique(cells.map((cell) => get(cell, "kv_cache_dtype")));
  const capability = device.capability ? `SM${device.capability.join("")}` : "";
  const about = [device.name, capability, device.memory_bytes ? size(device.memory_bytes) : ""];
  const kind = el("span", { class: `kind ${isVirtual(cells[0]) ? "virtual" : "measured"}` });
  kind.textContent = isVirtual(cells[0]) ? "virtual" : `measured (${device.kind || "real"})`;
  const button = el("button", { type: "button", "aria-expanded": "true" }, title);
  const count = el("span", { class: "count" });
  const words = el("span", { class: "facts" }, about.filter(Boolean).join(" · "));
  const head = el("div", { class: "head" }, el("h2", {}, button), kind, words, count);
  const body = el("div", { class: "body" });
  const section = el("section", { class: "facet", "aria-label": title }, head, body);
  const facet = { key, spec, version, title, cells, order, body, section, count, button, head, open: true, drawn: false };
  body.facet = facet;
  button.addEventListener("click", () => setOpen(facet, !facet.open));
  facets.push(facet);
  $("matrix").append(section);
}

function setOpen(facet, open) {
  facet.open = open;
  facet.button.setAttribute("aria-expanded", String(open));
  facet.body.hidden = !open;
  draw(facet);
}

/** Bring a facet to the top of the window. */
function goTo(facet) {
  if (!facet.open) setOpen(facet, true);
  draw(facet);
  facet.section.scrollIntoView({ block: "start" });
  facet.button.focus({ preventScroll: true });
}

/** To the facet before or after the one at the top of the window. */
function step(by) {
  const seen = facets.filter((facet) => facet.shown);
  const top = main.getBoundingClientRect().top;
  const here = seen.findLastIndex((facet) => facet.section.getBoundingClientRect().top <= top + 2);
  const next = seen[Math.max(0, here + by)];
  if (next) goTo(next);
}

/** Show what the filters let through. Only what is near the window is drawn now. */
function showFacets() {
  let shown = 0;
  current = null;
  nearFacets.disconnect();
  nearRows.disconnect();
  for (const facet of facets) {
    layOut(facet);
    shown += facet.shown;
    facet.section.hidden = facet.shown === 0;
    facet.count.replaceChildren(...tallyOf(facet.tally));
    facet.body.textContent = "";
    const rows = [...facet.models.values()].reduce((sum, of) => sum + of.size + (facet.flat ? 0 : 1), 0);
    facet.body.style.minHeight = `${rows * ROW + 60}px`;
  }
  // The first is drawn at once; what follows is far down until then.
  const first = facets.find((facet) => facet.shown && facet.open);
  if (first) draw(first);
  for (const facet of facets) if (facet.shown) nearFacets.observe(facet.body);
  $("shown").textContent = `${number(shown)} of ${number(data.cells.length)} cells`;
  let empty = $("empty");
  if (!empty) $("matrix").prepend((empty = el("p", { id: "empty", class: "empty" })));
  empty.textContent = data.cells.length ? "No cell is like this: clear a filter." : "This run has no cells.";
  empty.hidden = shown > 0;
  showOverview();
  markCurrent();
}

/** One cell can be reached by Tab; arrows lead to the others. */
function markCurrent(button = null) {
  const found = button || (current !== null && $("matrix").querySelector(`[data-i="${current}"]`)) || $("matrix").querySelector(".c");
  const old = $("matrix").querySelector('.c[tabindex="0"]');
  if (old && old !== found) old.tabIndex = -1;
  if (!found) return;
  found.tabIndex = 0;
  current = Number(found.dataset.i);
}

/** The cell beside `button`; over the end of a table to the next. */
function beside(button, key) {
  const td = button.closest("td");
  const line = td.parentElement;
  if (key === "ArrowLeft" || key === "ArrowRight" || key === "Home" || key === "End") {
    const cells = [...line.querySelectorAll(".c")];
    const from = cells.indexOf(button);
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: cells.length - 1 }[key];
    return cells[to] || null;
  }
  const by = key === "ArrowUp" || key === "PageUp" ? -1 : 1;
  let left = key === "PageUp" || key === "PageDown" ? 10 : 1;
  const { facet } = line;
  const lines = [...facet.body.querySelectorAll("tr.d")];
  let best = null;
  for (let index = lines.indexOf(line) + by; left > 0 && lines[index]; index += by) {
    fill(lines[index]);
    const found = lines[index].cells[td.cellIndex].querySelector(".c");
    if (found) {
      best = found;
      left -= 1;
    }
  }
  if (best) return best;
  for (let index = facets.indexOf(facet) + by; facets[index]; index += by) {
    draw(facets[index]);
    const [end] = facets[index].open ? [...facets[index].body.querySelectorAll("tr.d")].slice(by > 0 ? 0 : -1) : [];
    if (end) {
      fill(end);
      return end.querySelector(".c");
    }
  }
  return null;
}

const MOVES = new Set(["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End", "PageUp", "PageDown"]);

/** Keys on a cell. Enter is the button's own. */
function moveOnKey(event) {
  const button = event.target.closest(".c");
  if (!button || !MOVES.has(event.key) || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  const next = beside(button, event.key);
  if (!next) return;
  markCurrent(next);
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest", inline: "nearest" });
}
