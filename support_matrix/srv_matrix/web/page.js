// The filterable matrix. State lives in the address alone (#platform=npu&status=planned&cell=page_size@npu:a3),
// so every view and every open cell is a link. Functions above `start` touch no document and are tested by themselves.
"use strict";

const WORDS = {
  supported: "yes", limited: "partly", experimental: "experimental", unknown: "unknown",
  planned: "planned", unsupported: "no", not_applicable: "not applicable",
};
const WORKS = ["supported", "limited", "experimental"];
const FIELDS = ["text", "platform", "variant", "status", "level", "values", "cell"];

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

function rowsOf(data, state) {
  const rows = [];
  for (const argument of data.arguments) {
    rows.push({ feature: argument.name, argument, cells: byPlace(argument.cells) });
    if (!state.values) continue;
    for (const [value, cells] of Object.entries(argument.values)) {
      rows.push({ feature: `${argument.name}=${value}`, argument, value, cells: byPlace(cells) });
    }
  }
  return rows;
}

function byPlace(cells) {
  return Object.fromEntries(cells.flatMap((cell) => cell.on.map((place) => [place, cell])));
}

function isVerified(cell) {
  return WORKS.includes(cell.status) && (cell.level === "E4" || cell.level === "E5");
}

function cellMatches(cell, state) {
  if (!cell) return false;
  if (state.status && cell.status !== state.status) return false;
  if (state.level === "verified") return isVerified(cell);
  if (state.level === "none") return !cell.level;
  return !state.level || cell.level === state.level;
}

function rowMatches(row, places, state) {
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  const said = [row.feature, ...row.argument.flags, row.argument.help, row.argument.group]
    .concat(places.map((place) => (row.cells[place] || {}).reason || "")).join(" ").toLowerCase();
  return words.every((word) => said.includes(word)) && places.some((place) => cellMatches(row.cells[place], state));
}

function cellText(cell) {
  const word = isVerified(cell) ? `✓ ${WORDS[cell.status]}`
    : cell.status === "supported" ? "declared" : WORDS[cell.status];
  return [word, cell.level || ""];
}

function factsOf(row, place, cell) {
  return [
    ["Argument", row.argument.flags.join(", ")],
    ["What it is", row.argument.help],
    ["Options", row.argument.options],
    ["Prints", WORDS[cell.status]],
    ["The platform declares", WORDS[cell.declared]],
    ["Core has it", WORDS[cell.core]],
    ["Reason", cell.reason || ""],
    ["Code", cell.reason_code || ""],
    ["Needs", cell.requires || ""],
    ["Since", cell.since || ""],
  ].filter(([, text]) => text);
}

function evidenceOf(data, cell) {
  const lines = (cell.evidence || []).map((each) =>
    [each.level, each.outcome, each.test, each.device, each.date, `commit ${each.commit}`, each.driver, each.note]
      .filter(Boolean).join(" · "));
  if (!lines.length) lines.push("Nothing has been run for this cell.");
  if (cell.level) lines.push(`${cell.level}: ${data.levels[cell.level]}`);
  return lines;
}

function start(document, window) {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const make = (name, text, attributes = {}) => {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  let state = readState(window.location.hash);

  const fill = (id, words) => {
    at(id).replaceChildren(...words.map(([value, text]) => make("option", text, { value })));
    at(id).value = state[id];
  };

  function showFilters() {
    const chosen = state.platform ? [data.platforms[state.platform]].filter(Boolean) : Object.values(data.platforms);
    fill("platform", [["", "all"], ...Object.keys(data.platforms).map((name) => [name, name])]);
    fill("variant", [["", "all"], ...chosen.flatMap((each) => each.variants).map((name) => [name, name])]);
    fill("status", [["", "any"], ...Object.entries(WORDS)]);
    fill("level", [["", "any"], ["verified", "run on the device"],
      ...Object.entries(data.levels).map(([name, told]) => [name, `${name}: ${told}`]), ["none", "none"]]);
    if (at("text").value !== state.text) at("text").value = state.text;
    at("values").checked = Boolean(state.values);
  }

  function showTable() {
    const places = placesOf(data, state);
    const rows = rowsOf(data, state).filter((row) => rowMatches(row, places, state));
    const head = make("tr");
    head.append(make("th", "Argument", { scope: "col" }), ...places.map((place) => make("th", place, { scope: "col" })));
    at("matrix").tHead.replaceChildren(head);
    at("matrix").tBodies[0].replaceChildren(...rows.map((row) => showRow(row, places)));
    at("count").textContent = `${rows.length} rows on ${places.length} variants`;
  }

  function showRow(row, places) {
    const line = make("tr", "", { class: row.value === undefined ? "" : "value" });
    const title = make("th", row.value === undefined ? row.argument.flags[0] : `= ${row.value}`, { scope: "row" });
    if (row.value === undefined) title.append(make("small", row.argument.help));
    line.append(title, ...places.map((place) => showCell(row, place)));
    return line;
  }

  function showCell(row, place) {
    const cell = row.cells[place];
    if (!cell) return make("td");
    const [word, level] = cellText(cell);
    const name = `${row.feature}@${place}`;
    const button = make("button", word, { type: "button", "data-cell": name, class: isVerified(cell) ? "verified" : cell.status });
    button.setAttribute("aria-label", `${row.feature} on ${place}: ${word} ${level}`);
    if (level) button.append(make("small", level));
    const box = make("td", "", { class: cellMatches(cell, state) ? "" : "aside" });
    box.append(button);
    return box;
  }

  function showDetail() {
    const dialog = at("detail");
    const cut = state.cell.lastIndexOf("@");
    const [feature, place] = [state.cell.slice(0, cut), state.cell.slice(cut + 1)];
    const row = state.cell && rowsOf(data, { ...state, values: "1" }).find((each) => each.feature === feature);
    const cell = row && row.cells[place];
    if (!cell) {
      if (dialog.open) dialog.close();
      return;
    }
    at("detail-title").textContent = `${feature} on ${place}`;
    at("detail-facts").replaceChildren(...factsOf(row, place, cell).flatMap(([term, text]) => [make("dt", term), make("dd", text)]));
    at("detail-evidence").replaceChildren(...evidenceOf(data, cell).map((line) => make("li", line)));
    at("detail-link").setAttribute("href", writeState({ cell: state.cell }));
    if (!dialog.open) dialog.showModal();
  }

  function go(changes, replace) {
    state = { ...state, ...changes };
    const place = writeState(state);
    if (replace) window.history.replaceState(null, "", place);
    else window.history.pushState(null, "", place);
    show();
  }

  let shown = "";
  function show() {
    showFilters();
    const view = writeState({ ...state, cell: "" });
    if (view !== shown || !at("matrix").tHead.rows.length) showTable();
    shown = view;
    showDetail();
  }

  function move(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const from = event.target.closest && event.target.closest("td");
    if (!step || !from) return;
    const line = at("matrix").rows[from.parentElement.rowIndex + step[0]];
    const next = line && line.cells[from.cellIndex + step[1]];
    const button = next && next.querySelector("button");
    if (button) {
      event.preventDefault();
      button.focus();
    }
  }

  at("filters").addEventListener("submit", (event) => event.preventDefault());
  at("filters").addEventListener("reset", (event) => {
    event.preventDefault();
    go(readState(""), false);
  });
  at("filters").addEventListener("change", (event) => {
    const { id, type, checked, value } = event.target;
    if (id === "text") return;
    go({ [id]: type === "checkbox" ? (checked ? "1" : "") : value, ...(id === "platform" ? { variant: "" } : {}) }, false);
  });
  at("text").addEventListener("input", () => go({ text: at("text").value }, true));
  at("matrix").addEventListener("click", (event) => {
    const button = event.target.closest("button[data-cell]");
    if (button) go({ cell: button.dataset.cell }, false);
  });
  at("matrix").addEventListener("keydown", move);
  at("detail").addEventListener("close", () => state.cell && go({ cell: "" }, false));
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT)$/.test(event.target.tagName)) {
      event.preventDefault();
      at("text").focus();
    }
  });
  const follow = () => {
    state = readState(window.location.hash);
    show();
  };
  window.addEventListener("hashchange", follow);
  window.addEventListener("popstate", follow);
  show();
}

if (typeof document !== "undefined") start(document, window);
if (typeof module !== "undefined") {
  module.exports = { readState, writeState, placesOf, rowsOf, cellMatches, rowMatches, cellText, evidenceOf, isVerified };
}
