// The short story of a cell beside it: on hover, on focus by key, and on a first tap.
const story = $("story");
let told = null;

function storyOf(cell) {
  const asked = `${get(cell, "model")} · ${rowName(cell)} · ${get(cell, "kv_cache_dtype")}`;
  const verdict = get(cell, "verdict");
  const parts = [
    el("strong", {}, asked),
    el("span", { class: `tag ${tone(cell)}` }, `${glyph(verdict)} ${verdict}${flag(cell) === "k" ? ", known" : ""}`),
    el("p", {}, clipped(get(cell, "reason") || "no reason given", 260)),
  ];
  const became = get(cell, "resolved") || {};
  const facts = [];
  if (became.selected) facts.push(`backend ${became.selected}`);
  if (became.kv_cache_dtype) facts.push(`dtype ${became.kv_cache_dtype}`);
  if (get(cell, "page") !== null) facts.push(`page ${number(get(cell, "page"))} B`);
  if (get(cell, "kv_bytes_per_token")) facts.push(`${number(get(cell, "kv_bytes_per_token"))} B/token`);
  if (facts.length) parts.push(el("p", { class: "facts" }, facts.join(" · ")));
  return parts;
}

function tell(button, tapped = false) {
  const cell = data.cells[Number(button.dataset.i)];
  told = button;
  story.replaceChildren(...storyOf(cell));
  if (tapped) story.append(el("p", { class: "hint" }, "Tap again for the detail"));
  story.hidden = false;
  const box = button.getBoundingClientRect();
  const own = story.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - own.width - 8));
  const below = box.bottom + 6;
  const top = below + own.height > innerHeight - 8 ? Math.max(8, box.top - own.height - 6) : below;
  story.style.left = `${left}px`;
  story.style.top = `${top}px`;
}

function hush() {
  told = null;
  story.hidden = true;
}

function listenForStories(open) {
  const area = $("matrix");
  let touch = false;
  area.addEventListener("pointerdown", (event) => {
    touch = event.pointerType === "touch";
  });
  area.addEventListener("pointerover", (event) => {
    const button = event.target.closest(".c");
    if (event.pointerType === "touch") return;
    if (button) tell(button);
    else hush();
  });
  area.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch") hush();
  });
  area.addEventListener("focusin", (event) => {
    if (event.target.matches(".c:focus-visible")) tell(event.target);
  });
  area.addEventListener("focusout", () => {
    if (!touch) hush();
  });
  area.addEventListener("click", (event) => {
    const button = event.target.closest(".c");
    if (!button) return hush();
    markCurrent(button);
    if (touch && event.detail && told !== button) return tell(button, true);
    hush();
    return open(data.cells[Number(button.dataset.i)]);
  });
  $("main").addEventListener("scroll", () => told && !touch && !told.matches(":hover") && hush(), { passive: true });
}
