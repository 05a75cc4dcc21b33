// The tables: one for each device and engine, drawn when it comes near the window.
const facets = [];
const FIRST = 1000; // Cells that are drawn at once, and in each step after.
const PAUSE = 100; // Milliseconds between steps, for the page to answer.
let current = null; // The cell that Tab leads to.

/** Rows, columns and cells of a facet that the filters let through. */
function layOut(facet) {
  const columns = new Set();
  const models = new Map();
  let shown = 0;
  for (const cell of facet.cells) {
    if (!matches(cell)) continue;
    shown += 1;
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
}

/** What a screen reader says of a cell. */
function spoken(cell) {
  const parts = [get(cell, "verdict")];
  if (flag(cell)) parts.push(flag(cell) === "k" ? "known failure" : "known entry no longer holds");
  if (get(cell, "page") !== null) parts.push(`page ${number(get(cell, "page"))} bytes`);
  if (resolved(cell)) parts.push(`resolved ${resolved(cell)}`);
  return parts.join(", ");
}

function cellHtml(cell) {
  if (cell === undefined) return '<td class="none"><span class="vh">none</span></td>';
  const page = get(cell, "page");
  const sign = esc(glyph(get(cell, "verdict"))) + (flag(cell) ? `<sup>${flag(cell)}</sup>` : "");
  const pages = page === null ? "" : `<span class="p">${number(page)}</span>`;
  const became = resolved(cell) ? `<span class="r">${breakable(resolved(cell))}</span>` : "";
  return (
    `<td><button type="button" tabindex="-1" class="c ${tone(cell)}" data-i="${cell.index}" ` +
    `aria-label="${esc(spoken(cell))}"><span class="g">${sign}</span>${pages}${became}</button></td>`
  );
}

function tableHtml(facet) {
  const heads = facet.columns.map((name) => `<th scope="col">${breakable(name)}</th>`).join("");
  const html = [
    `<table><caption class="vh">${esc(facet.title)}: what the KV cache became</caption>`,
    `<thead><tr><th scope="col" class="corner">backend</th>${heads}</tr></thead>`,
  ];
  html.push(bodiesHtml(facet, FIRST), "</table>");
  return html.join("");
}

/** The next models of a facet as <tbody>s, at least `most` cells if there are so many. */
function bodiesHtml(facet, most) {
  const html = [];
  let count = 0;
  while (facet.rest.length && count < most) {
    const [model, rows] = facet.rest.shift();
    count += rows.size * facet.columns.length;
    html.push(
      `<tbody><tr class="m"><th scope="rowgroup" colspan="${facet.columns.length + 1}">`,
      `<span>${esc(model)}</span></th></tr>`,
    );
    for (const [name, row] of rows) {
      html.push(`<tr><th scope="row">${breakable(name)}</th>`);
      for (const column of facet.columns) html.push(cellHtml(row.get(column)));
      html.push("</tr>");
    }
    html.push("</tbody>");
  }
  return html.join("");
}

function draw(facet) {
  if (facet.drawn || !facet.open || !facet.shown) return;
  facet.drawn = true;
  facet.body.classList.remove("waiting");
  facet.rest = [...facet.models];
  facet.body.innerHTML = tableHtml(facet);
  if (current === null) markCurrent();
  later(facet);
}

/** Draw what is left of a facet once the page has had time to answer. */
function later(facet) {
  if (!facet.rest.length) {
    facet.body.style.minHeight = "";
    return;
  }
  const left = facet.rest;
  setTimeout(() => {
    // Another filter may have come meanwhile.
    if (facet.rest === left && facet.rest.length) drawMore(facet, FIRST);
  }, PAUSE);
}

function drawMore(facet, most) {
  facet.body.firstChild.insertAdjacentHTML("beforeend", bodiesHtml(facet, most));
  later(facet);
}

/** Draw all of a facet now. */
function finish(facet) {
  draw(facet);
  if (facet.drawn && facet.rest.length) drawMore(facet, Infinity);
}

const near = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target.facet);
  },
  { root: $("main"), rootMargin: "800px" },
);

/** The sections of all facets, made once. */
function buildFacets() {
  const groups = new Map();
  data.cells.forEach((cell, index) => {
    cell.index = index;
    if (!groups.has(place(cell))) groups.set(place(cell), []);
    groups.get(place(cell)).push(cell);
  });
  for (const [key, cells] of groups) {
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
    const head = el("h2", {}, button, " ", kind, " ");
    const facts = el("span", { class: "facts" }, about.filter(Boolean).join(" · "));
    const body = el("div", { class: "body waiting" });
    const section = el("section", { "aria-label": title }, el("div", { class: "head" }, head, facts, count), body);
    const facet = { key, title, cells, order, body, section, count, open: true, drawn: false, rest: [] };
    body.facet = facet;
    button.addEventListener("click", () => {
      facet.open = !facet.open;
      button.setAttribute("aria-expanded", String(facet.open));
      body.hidden = !facet.open;
      draw(facet);
    });
    facets.push(facet);
    $("matrix").append(section);
  }
}

/** Show what the filters let through. Only what is near the window is drawn now. */
function showFacets() {
  let shown = 0;
  current = null;
  for (const facet of facets) {
    near.unobserve(facet.body);
    layOut(facet);
    shown += facet.shown;
    facet.drawn = false;
    facet.rest = [];
    facet.section.hidden = facet.shown === 0;
    facet.count.textContent = `${number(facet.shown)} of ${number(facet.cells.length)}`;
    facet.body.textContent = "";
    facet.body.classList.add("waiting");
    const rows = [...facet.models.values()].reduce((sum, of) => sum + of.size + 1, 0);
    facet.body.style.minHeight = `${rows * 34}px`;
  }
  // The first is drawn at once; what follows is far down until then.
  const first = facets.find((facet) => facet.shown && facet.open);
  if (first) draw(first);
  for (const facet of facets) if (facet.shown) near.observe(facet.body);
  $("shown").textContent = `${number(shown)} of ${number(data.cells.length)} cells`;
  let empty = $("empty");
  if (!empty) $("matrix").prepend((empty = el("p", { id: "empty", class: "empty" })));
  empty.textContent = data.cells.length ? "No cell is like this: clear a filter." : "This run has no cells.";
  empty.hidden = shown > 0;
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
  const row = td.parentElement;
  if (key === "ArrowLeft" || key === "ArrowRight" || key === "Home" || key === "End") {
    const cells = [...row.querySelectorAll(".c")];
    const from = cells.indexOf(button);
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: cells.length - 1 }[key];
    return cells[to] || null;
  }
  const step = key === "ArrowUp" || key === "PageUp" ? -1 : 1;
  let left = key === "PageUp" || key === "PageDown" ? 10 : 1;
  const table = row.closest("table");
  finish(table.parentElement.facet);
  let best = null;
  for (let index = row.rowIndex + step; left > 0 && table.rows[index]; index += step) {
    const other = table.rows[index].cells[td.cellIndex];
    const found = other && other.querySelector(".c");
    if (found) {
      best = found;
      left -= 1;
    }
  }
  if (best) return best;
  const facet = table.parentElement.facet;
  for (let index = facets.indexOf(facet) + step; facets[index]; index += step) {
    finish(facets[index]);
    const cells = facets[index].open ? [...facets[index].body.querySelectorAll(".c")] : [];
    if (cells.length) return step > 0 ? cells[0] : cells[cells.length - 1];
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
