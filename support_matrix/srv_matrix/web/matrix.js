// The filterable matrix, rendered from SUPPORT (support.json). All state is in the URL fragment
// (#platform=npu&status=planned&cell=page_size@npu:a3), so every view and every open cell is a link.
// Functions above `start` do not access the document.
"use strict";

const WORDS = {
  supported: "yes", limited: "partly", experimental: "experimental", unknown: "unknown",
  planned: "planned", unsupported: "no", not_applicable: "not applicable",
};
const OLDER = "old: much of the code has changed since it was run";
const KINDS = {
  arg: "arguments", pair: "pairs", op: "operations", model: "models", endpoint: "endpoints",
};
const FIELDS = ["text", "platform", "variant", "status", "level", "kind", "folded", "values", "words", "cell"];

function readState(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  return Object.fromEntries(FIELDS.map((name) => [name, given.get(name) || ""]));
}

function writeState(state) {
  const kept = FIELDS.filter((name) => state[name]).map((name) => [name, state[name]]);
  return "#" + new URLSearchParams(kept).toString();
}

function placesOf(data, state) {
  return Object.entries(data.platforms)
    .filter(([name]) => !state.platform || name === state.platform)
    .flatMap(([name, platform]) => platform.variants.map((variant) => `${name}:${variant}`))
    .filter((place) => !state.variant || place.split(":")[1] === state.variant);
}

// The platforms with their places; `folded`: shown as one column.
function groupsOf(data, state) {
  const folded = (state.folded || "").split(",");
  const groups = new Map();
  for (const place of placesOf(data, state)) {
    const platform = place.split(":")[0];
    if (!groups.has(platform)) groups.set(platform, { platform, places: [], folded: folded.includes(platform) });
    groups.get(platform).places.push(place);
  }
  return [...groups.values()];
}

function toggled(folded, platform) {
  const names = (folded || "").split(",").filter(Boolean);
  return (names.includes(platform) ? names.filter((name) => name !== platform) : [...names, platform]).join(",");
}

// All lists of entries with cells are shown, whatever their name; arguments come first.
function entriesOf(data) {
  const { arguments: first = [], ...others } = data;
  const lists = [["arg", first], ...Object.entries(others).map(([name, list]) => [name.replace(/s$/, ""), list])];
  return lists
    .filter(([, list]) => Array.isArray(list))
    .flatMap(([kind, list]) => list.filter((entry) => entry.cells).map((entry) => ({ kind, ...entry })))
    .map((entry) => ({ flags: [], values: {}, help: "", group: "", options: "", ...entry, ...namesOf(entry) }));
}

// The feature of its records, such as "endpoint:POST /generate", and the name without the kind.
function namesOf(entry) {
  const full = entry.name || entry.feature;
  if (entry.kind === "arg") return { feature: full, name: full };
  const name = full.startsWith(`${entry.kind}:`) ? full.slice(entry.kind.length + 1) : full;
  return { feature: `${entry.kind}:${name}`, name };
}

function kindsOf(data) {
  return [...new Set(entriesOf(data).map((entry) => entry.kind))].map((kind) => [kind, KINDS[kind] || kind]);
}

function rowsOf(data, state) {
  const rows = [];
  for (const entry of entriesOf(data)) {
    if (state.kind && entry.kind !== state.kind) continue;
    rows.push({ feature: entry.feature, entry, cells: byPlace(entry.cells) });
    if (!state.values) continue;
    for (const [value, cells] of Object.entries(entry.values)) {
      rows.push({ feature: `${entry.feature}=${value}`, entry, value, cells: byPlace(cells) });
    }
  }
  return rows;
}

function byPlace(cells) {
  return Object.fromEntries(cells.flatMap((cell) => cell.on.map((place) => [place, cell])));
}

function isVerified(cell) {
  return cell.look === "verified";
}

function cellMatches(cell, state) {
  if (!cell) return false;
  if (state.status && cell.status !== state.status) return false;
  if (state.level === "verified") return isVerified(cell);
  if (state.level === "older") return Boolean(cell.older);
  if (state.level === "none") return !cell.level;
  return !state.level || cell.level === state.level;
}

function rowMatches(row, places, state) {
  if (!places.some((place) => cellMatches(row.cells[place], state))) return false;
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return true;
  const text = [row.feature, ...row.entry.flags, row.entry.help, row.entry.group]
    .concat(places.map((place) => (row.cells[place] || {}).reason || "")).join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

function wordOf(status) {
  return WORDS[status] || status;
}

function cellText(cell) {
  const word = isVerified(cell) ? `✓ ${wordOf(cell.status)}`
    : cell.status === "supported" ? cell.word || "not run" : wordOf(cell.status);
  return [word, cell.level || ""];
}

// `meaning`: of each sign of the glyph, by the legend.
function lookOf(data, cell) {
  const { glyph = "?", look = "unknown" } = cell;
  return { glyph, look, meaning: [...glyph].map((sign) => ((data.legend || {})[sign] || {}).meaning).filter(Boolean).join("; ") };
}

// What a folded platform shows: each glyph of its variants once, in the color of the weakest.
function summaryOf(data, row, places, state) {
  const cells = places.map((place) => row.cells[place]).filter(Boolean);
  const looks = cells.filter((cell) => cellMatches(cell, state)).map((cell) => lookOf(data, cell));
  const order = Object.values(data.legend || {}).map((sign) => sign.look);
  const weakest = looks.reduce((one, other) => (order.indexOf(other.look) > order.indexOf(one.look) ? other : one), looks[0]);
  return {
    empty: !cells.length,
    glyph: [...new Set((looks.length ? looks : cells.map((cell) => lookOf(data, cell))).map((look) => look.glyph))].join(" "),
    look: weakest ? weakest.look : "aside",
    older: cells.some((cell) => cell.older),
    text: places.map((place) => `${place.split(":")[1]}: ${row.cells[place] ? cellText(row.cells[place]).join(" ").trim() : "no cell"}`).join(", "),
  };
}

// When evidence was recorded: a line for each variant and commit, or date of a report, the newest first.
function runsOf(data) {
  const runs = new Map();
  for (const row of rowsOf(data, { values: "1" })) {
    for (const [place, cell] of Object.entries(row.cells)) {
      for (const each of cell.evidence || []) {
        const key = `${place} ${each.commit || each.date} ${each.device}`;
        if (!runs.has(key)) runs.set(key, { place, ...each, age: ageOf(data, each, place), cells: 0 });
        runs.get(key).cells += 1;
      }
    }
  }
  return [...runs.values()].sort((one, other) => one.place.localeCompare(other.place) || other.date.localeCompare(one.date))
    .map((run) => [run.place, productOf(data, run.place), run.date, run.commit && `commit ${run.commit.slice(0, 8)}`, run.device, versionsOf(run), `${run.cells} cells`, ageText(run.age)]
      .filter(Boolean).join(" · "));
}

function ageText(age) {
  return age && `${age.old ? "old: " : ""}${age.commits} commits and ${age.lines} changed lines ago`;
}

// How much of the code that a run on this place covers has changed since its commit; undefined if unknown.
function ageOf(data, evidence, place) {
  return ((data.ages || {})[place.split(":")[0]] || {})[evidence.commit];
}

// What a variant of a platform is sold as; "" if that is not known, or for a whole platform.
function productOf(data, place) {
  const [platform, variant] = place.split(":");
  return (data.platforms[platform]?.products || {})[variant] || "";
}

function factsOf(data, row, cell, place) {
  return [
    ["Product", productOf(data, place)],
    ["Flags", row.entry.flags.join(", ")],
    ["Description", row.entry.help],
    ["Options", row.entry.options],
    ["Status", cell.status && wordOf(cell.status)],
    ["Declared by the platform", cell.declared && wordOf(cell.declared)],
    ["Implemented in core", cell.core && wordOf(cell.core)],
    ["Reason", cell.reason],
    ["Code", cell.reason_code],
    ["Needs", cell.requires],
    ["Since", cell.since],
  ].filter(([, text]) => text);
}

function versionsOf(evidence) {
  const named = Object.entries(evidence.versions || {}).map(([name, version]) => `${name} ${version}`);
  return [evidence.plugin_version, named.join(", ") || "versions unknown", evidence.simulator].filter(Boolean).join(" · ");
}

function evidenceOf(data, cell, place = "") {
  const lines = (cell.evidence || []).map((each) => {
    const age = ageOf(data, each, place);
    return [each.level, each.outcome, each.test, each.device, each.date, each.commit && `commit ${each.commit}`, versionsOf(each),
      each.note, ageText(age)].filter(Boolean).join(" · ");
  });
  if (!lines.length) lines.push(isVerified(cell) ? "Its values were run; see the evidence of each value." : "Nothing has been run for this cell.");
  if (cell.level) lines.push(`${cell.level}: ${data.levels[cell.level] || ""}`);
  return lines;
}

// `pages`: relative URL of the platforms' pages; empty if there are none.
function start(data, document, window, pages) {
  const at = (id) => document.getElementById(id);
  const make = (name, text, attributes = {}) => {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  let state = readState(window.location.hash);
  let shown = null;
  let opened = null;

  const fill = (id, options) => {
    at(id).replaceChildren(...options.map(([value, text]) => make("option", text, { value })));
    at(id).value = state[id];
  };

  function showFilters() {
    const chosen = state.platform ? [data.platforms[state.platform]].filter(Boolean) : Object.values(data.platforms);
    fill("platform", [["", "all"], ...Object.keys(data.platforms).map((name) => [name, name])]);
    fill("variant", [["", "all"], ...chosen.flatMap((each) => each.variants).map((name) => [name, name])]);
    fill("status", [["", "any"], ...Object.entries(WORDS)]);
    fill("level", [["", "any"], ["verified", "run on the device (E4, E5)"],
      ...(data.ages ? [["older", "run, but old"]] : []),
      ...Object.entries(data.levels).map(([name, meaning]) => [name, `${name}: ${meaning}`]), ["none", "none"]]);
    fill("kind", [["", "all"], ...kindsOf(data)]);
    if (at("text").value !== state.text) at("text").value = state.text;
    at("values").checked = Boolean(state.values);
    at("words").checked = Boolean(state.words);
  }

  function showLegend() {
    const entries = Object.entries(data.legend || {}).map(([glyph, { look, meaning }]) => [glyph, look, meaning]);
    if (data.ages) entries.push(["✓", "verified older", OLDER]);
    at("legend").replaceChildren(...entries.map(([glyph, look, meaning]) => {
      const item = make("li");
      item.append(make("span", glyph, { class: `glyph ${look}`, "aria-hidden": "true" }), meaning);
      return item;
    }));
  }

  function showRuns() {
    const lines = runsOf(data);
    at("runs-box").hidden = !lines.length;
    at("runs-box").open = Object.keys(data.platforms).length === 1;
    at("runs").replaceChildren(...lines.map((line) => make("li", line)));
  }

  function showTable() {
    const places = placesOf(data, state);
    const groups = groupsOf(data, state);
    const rows = rowsOf(data, state).filter((row) => rowMatches(row, places, state));
    const [head, names] = [make("tr", "", { role: "row" }), make("tr", "", { role: "row" })];
    head.append(make("th", "Feature", { scope: "col", role: "columnheader", rowspan: "2" }), ...groups.map(showPlatform));
    names.append(...groups.flatMap((group) => (group.folded ? [showName("all", group)] : group.places.map((place) => showName(place.split(":")[1], group)))));
    const focused = document.activeElement && document.activeElement.dataset.fold;
    at("matrix").tHead.replaceChildren(head, names);
    at("matrix").tBodies[0].replaceChildren(...rows.map((row) => showRow(row, groups)));
    if (focused) at("matrix").tHead.querySelector(`[data-fold="${CSS.escape(focused)}"]`)?.focus();
    at("count").textContent = rows.length ? `${rows.length} rows on ${places.length} variants`
      : "Nothing matches these filters. Clear removes them.";
    at("scroll").hidden = !rows.length;
    at("scroll").scrollTop = 0;
    const first = at("matrix").tBodies[0].querySelector("button");
    if (first) first.tabIndex = 0;
  }

  function showPlatform(group) {
    const title = make("th", "", { scope: "colgroup", role: "columnheader", colspan: group.folded ? 1 : group.places.length, class: "platform" });
    const text = `${group.folded ? "Unfold" : "Fold"} ${group.platform}`;
    title.append(make("button", `${group.folded ? "▸" : "▾"} ${group.platform}`, {
      type: "button", "data-fold": group.platform, "aria-expanded": String(!group.folded), title: text,
    }));
    return title;
  }

  function showName(name, group) {
    return make("th", name, {
      scope: "col", role: "columnheader", class: "variant", "data-platform": group.platform,
      title: productOf(data, `${group.platform}:${name}`),
    });
  }

  function showRow(row, groups) {
    const line = make("tr", "", { role: "row", class: row.value === undefined ? "" : "value" });
    const name = row.entry.flags[0] || row.entry.name;
    const title = make("th", row.value === undefined ? name : `${name} = ${row.value}`, { scope: "row", role: "rowheader" });
    const description = row.entry.help || (row.entry.kind === "arg" ? "" : row.entry.kind);
    if (row.value === undefined && description) title.append(make("small", description));
    line.append(title, ...groups.flatMap((group) => (group.folded ? [showSummary(row, group)] : group.places.map((place) => showCell(row, place)))));
    return line;
  }

  function showCell(row, place) {
    const box = make("td", "", { role: "gridcell" });
    const cell = row.cells[place];
    if (!cell) return box;
    const [word, level] = cellText(cell);
    const { glyph, look, meaning } = lookOf(data, cell);
    const text = [`${row.feature} on ${place}: ${word} ${level}`.trim(), cell.older && OLDER].filter(Boolean).join("; ");
    const button = make("button", "", {
      type: "button", class: (cellMatches(cell, state) ? look : "aside") + (cell.older ? " older" : ""), tabindex: "-1",
      "data-cell": `${row.feature}@${place}`, "aria-label": text, title: `${text}\n${meaning}`,
    });
    button.append(make("span", place, { class: "place" }), make("span", glyph, { class: "glyph", "aria-hidden": "true" }));
    if (state.words) button.append(make("span", word), ...(level ? [make("small", level)] : []));
    box.append(button);
    return box;
  }

  function showSummary(row, group) {
    const box = make("td", "", { role: "gridcell" });
    const { empty, glyph, look, older, text } = summaryOf(data, row, group.places, state);
    if (empty) return box;
    const label = `${row.feature} on ${group.platform}: ${text}`;
    const button = make("button", "", {
      type: "button", class: look + (older ? " older" : ""), tabindex: "-1", "data-cell": `${row.feature}@${group.platform}`,
      "aria-label": label, title: label,
    });
    button.append(make("span", group.platform, { class: "place" }), make("span", glyph, { class: "glyph", "aria-hidden": "true" }));
    box.append(button);
    return box;
  }

  function showDetail() {
    const dialog = at("detail");
    const cut = state.cell.lastIndexOf("@");
    const [feature, place] = [state.cell.slice(0, cut), state.cell.slice(cut + 1)];
    const row = state.cell && rowsOf(data, { values: "1" }).find((each) => each.feature === feature);
    const cell = row && row.cells[place];
    const variants = row && data.platforms[place] ? placesOf(data, { platform: place }).filter((each) => row.cells[each]) : [];
    if (!cell && !variants.length) {
      if (dialog.open) dialog.close();
      return;
    }
    if (dialog.open && opened === state.cell) return; // keep its focus
    opened = state.cell;
    const platform = place.split(":")[0];
    const links = [make("a", "Link to this cell", { href: writeState({ cell: state.cell }) })];
    if (pages) links.push(make("a", `All arguments on ${platform}`, { href: `${pages}${platform}.html` }));
    at("detail-title").textContent = `${feature} on ${place}`;
    at("detail-facts").replaceChildren(...factsOf(data, row, cell || {}, place).flatMap(([term, text]) => [make("dt", term), make("dd", text)]));
    at("detail-evidence").replaceChildren(...(cell ? evidenceOf(data, cell, place).map((line) => make("li", line))
      : variants.map((each) => showVariant(row, each))));
    at("detail-links").replaceChildren(...links);
    if (!dialog.open) dialog.showModal();
  }

  function showVariant(row, place) {
    const cell = row.cells[place];
    const runs = [...new Set((cell.evidence || []).map((each) => [each.date, each.commit && `at ${each.commit.slice(0, 8)}`].filter(Boolean).join(" ")))];
    const item = make("li", [cellText(cell).join(" ").trim(), ...runs].join(" · "));
    item.prepend(make("a", place, { href: writeState({ ...state, cell: `${row.feature}@${place}` }) }));
    return item;
  }

  function show() {
    showFilters();
    const view = writeState({ ...state, cell: "" });
    if (view !== shown) showTable();
    shown = view;
    showDetail();
  }

  function go(changes, how = "pushState") {
    state = { ...state, ...changes };
    const address = writeState(state);
    window.history[how](null, "", address === "#" ? window.location.pathname + window.location.search : address);
    show();
  }

  function follow() {
    state = readState(window.location.hash);
    show();
  }

  // Only one cell is a tab stop; arrow keys move on from there.
  function move(event) {
    const line = event.target.closest("tr");
    const from = event.target.closest("td");
    if (!from || event.ctrlKey || event.altKey || event.metaKey) return;
    const [row, column] = {
      ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
      Home: [0, 1 - from.cellIndex], End: [0, line.cells.length - 1 - from.cellIndex],
    }[event.key] || [];
    if (row === undefined) return;
    event.preventDefault();
    const next = (at("matrix").rows[line.rowIndex + row] || line).cells[from.cellIndex + column];
    const button = next && next.querySelector("button[data-cell]");
    if (button) button.focus();
  }

  function remember(event) {
    if (!event.target.dataset.cell) return;
    for (const each of at("matrix").querySelectorAll('button[tabindex="0"]')) each.tabIndex = -1;
    event.target.tabIndex = 0;
  }

  at("filters").addEventListener("submit", (event) => event.preventDefault());
  at("filters").addEventListener("reset", (event) => {
    event.preventDefault();
    go(readState(""));
  });
  at("filters").addEventListener("change", (event) => {
    const { id, type, checked, value } = event.target;
    if (id === "text") return;
    go({ [id]: type === "checkbox" ? (checked ? "1" : "") : value, ...(id === "platform" ? { variant: "" } : {}) });
  });
  at("text").addEventListener("input", () => go({ text: at("text").value }, "replaceState"));
  at("matrix").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button && button.dataset.cell) go({ cell: button.dataset.cell });
    if (button && button.dataset.fold) go({ folded: toggled(state.folded, button.dataset.fold) });
  });
  at("matrix").addEventListener("keydown", move);
  at("matrix").addEventListener("focusin", remember);
  at("detail").addEventListener("close", () => state.cell && go({ cell: "" }, "replaceState"));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && at("detail").open) at("detail").close(); // browsers do not close it after going back in history
    if (event.key !== "/" || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    event.preventDefault();
    event.stopImmediatePropagation(); // the theme has its own search on this key
    at("text").focus();
  }, true);
  window.addEventListener("hashchange", follow);
  window.addEventListener("popstate", follow);
  showLegend();
  showRuns();
  show();
}

if (typeof document !== "undefined") start(SUPPORT, document, window, document.currentScript.dataset.pages || "");
if (typeof module !== "undefined") {
  module.exports = {
    readState, writeState, placesOf, entriesOf, kindsOf, rowsOf, cellMatches, rowMatches, cellText, evidenceOf, isVerified,
    lookOf, groupsOf, toggled, summaryOf, runsOf,
  };
}
