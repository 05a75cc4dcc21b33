// Puts it all together.
const main = $("main");

function show() {
  showFilters();
  for (const button of document.querySelectorAll("[data-view]")) {
    button.setAttribute("aria-pressed", String(button.dataset.view === state.view));
  }
  $("matrix").hidden = state.view !== "matrix";
  $("charts").hidden = state.view !== "charts";
  showFacets();
  if (state.view === "charts") showCharts();
}

function changed() {
  writeHash();
  show();
}

function openCell(cell) {
  state.cell = get(cell, "id");
  writeHash(true);
  // From the detail of another cell: where the focus comes back to.
  const button = buttonOf(cell);
  if (button) {
    markCurrent(button);
    button.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  showDetail(cell);
}

/** The dialog as the hash has it. */
function showLinked() {
  const cell = state.cell && data.cells.find((one) => get(one, "id") === state.cell);
  if (cell) {
    current = cell.index;
    const button = state.view === "matrix" ? buttonOf(cell) : null;
    markCurrent();
    if (button) button.scrollIntoView({ block: "center", inline: "nearest" });
    showDetail(cell);
  } else if ($("detail").open) $("detail").close();
}

function followHash() {
  const before = JSON.stringify([...shownKey()]);
  readHash();
  if (before !== JSON.stringify([...shownKey()])) show();
  showLinked();
}

/** What a change of which needs drawing. */
function shownKey() {
  const chosen = Object.entries(state.chosen).map(([name, values]) => [name, ...values]);
  return [chosen, state.differences, state.search, state.view, state.chart];
}

const THEMES = ["", "light", "dark"];
const THEME_NAMES = { "": ["◐", "as the system has them"], light: ["☀", "light"], dark: ["☾", "dark"] };

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  const [sign, words] = THEME_NAMES[name];
  $("theme").textContent = sign;
  $("theme").setAttribute("aria-label", `Colours: ${words}`);
  $("theme").title = `Colours: ${words}`;
  try {
    localStorage.setItem("kvmatrix-theme", name);
  } catch {
    // A page from disk may have no storage: the choice is then for this visit alone.
  }
}

function startTheme() {
  let kept = "";
  try {
    kept = localStorage.getItem("kvmatrix-theme") || "";
  } catch {
    // As above.
  }
  setTheme(THEMES.includes(kept) ? kept : "");
  $("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || "";
    setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
  });
}

function showLegend() {
  const dialog = $("legend");
  const signs = Object.entries(data.verdicts).map(([name, [sign, meaning]]) => [`${sign} ${name}`, meaning]);
  const keys = [
    ["arrows", "move between cells; Home, End, Page Up and Page Down too"],
    ["Enter", "opens a cell"],
    ["Esc", "closes it"],
    ["[ and ]", "to the table before or after: of another engine, then of another device"],
    ["/", "searches: each word must be in the cell's name, verdict, reason or error"],
    ["?", "this"],
  ];
  const close = el("button", { type: "button", class: "close", "aria-label": "Close" }, "×");
  close.addEventListener("click", () => dialog.close());
  dialog.replaceChildren(
    el("div", { class: "title" }, el("h2", { id: "legend-title" }, "Legend and keys"), close),
    el("div", { class: "content" },
      el("p", {}, "A cell shows the verdict's sign, the page of its main attention layers in bytes, and the kv_cache_dtype that they ended up with. k: a known failure; s: a known entry that no longer holds; ≈: flaky, one engine gave both verdicts in earlier runs. Hatched: no such cell."),
      facts(signs), el("h3", {}, "Keys"), facts(keys)),
  );
  dialog.showModal();
}

function startKeys() {
  $("matrix").addEventListener("keydown", moveOnKey);
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input[type=search], select, textarea");
    if (event.key === "Escape" && typing) {
      main.focus();
      return;
    }
    if (event.key === "Escape") hush();
    if (typing || document.querySelector("dialog[open]") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") {
      event.preventDefault();
      $("search").focus();
      $("search").select();
    } else if (event.key === "?") showLegend();
    else if ((event.key === "[" || event.key === "]") && state.view === "matrix") step(event.key === "[" ? -1 : 1);
    else if (MOVES.has(event.key) && event.target === main) {
      const cell = $("matrix").querySelector('.c[tabindex="0"]');
      if (cell && state.view === "matrix") {
        event.preventDefault();
        cell.focus();
      }
    }
  });
}

function startControls() {
  let waiting = 0;
  $("search").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      state.search = $("search").value.trim();
      changed();
    }, 120);
  });
  $("more").addEventListener("click", () => {
    const open = $("more").getAttribute("aria-expanded") !== "true";
    $("more").setAttribute("aria-expanded", String(open));
    document.body.classList.toggle("filtering", open);
  });
  for (const button of document.querySelectorAll("[data-view]")) {
    button.addEventListener("click", () => {
      state.view = button.dataset.view;
      writeHash(true);
      show();
    });
  }
  const support = $("support");
  if (support) {
    support.addEventListener("toggle", () => {
      const table = support.querySelector("template");
      if (table) table.replaceWith(table.content);
    });
  }
  $("help").addEventListener("click", showLegend);
  $("skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  $("detail").addEventListener("close", () => {
    if (state.cell) {
      state.cell = "";
      writeHash();
    }
    const cell = $("matrix").querySelector('.c[tabindex="0"]');
    if (cell && state.view === "matrix") cell.focus({ preventScroll: true });
  });
  for (const dialog of document.querySelectorAll("dialog")) {
    // A click beside the dialog's content is a click on its backdrop.
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }
  document.addEventListener("click", (event) => {
    for (const open of document.querySelectorAll("details.filter[open]")) {
      if (!open.contains(event.target)) open.open = false;
    }
  });
}

buildFacets();
buildFilters(changed);
buildBaseline(changed);
// On a phone it would push the cells out of sight.
$("overview").open = !matchMedia("(max-width: 700px)").matches;
startTheme();
startControls();
startKeys();
listenForStories(openCell);
addEventListener("hashchange", followHash);
addEventListener("popstate", followHash);
addEventListener("beforeprint", () => facets.forEach(finish));
addEventListener("resize", () => state.view === "charts" && showCharts());
readHash();
show();
showLinked();
document.documentElement.dataset.ready = "yes";
