// Markdown as nodes of the document: `markdown(text)` returns an array of them.
// Every text becomes a text node and every link is http, https or mailto, so that no markup of a model is ever markup here.

// Each expression takes a time that grows with the length of a line, not with its square: a repetition is followed by what
// it cannot match itself, or by all of the rest.
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)/s;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,8})([-*+]|\d{1,9}[.)])[ \t]+(.*)/s;
const COLUMN = /^:?-+:?$/;
const DEEPEST = 8; // of blocks in blocks and marks in marks; deeper ones are shown as they are written

function make(name, ...children) {
  const element = document.createElement(name);
  element.append(...children);
  return element;
}

function markdown(text, depth = 0) {
  const lines = text.split("\n");
  const nodes = [];
  for (let at = 0; at < lines.length; ) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const read = depth < DEEPEST ? (fence(lines, at) ?? simple(lines, at) ?? nested(lines, at, depth)) : null;
    const [node, next] = read ?? paragraph(lines, at, depth);
    nodes.push(node);
    at = next;
  }
  return nodes;
}

function fence(lines, at) {
  const opened = FENCE.exec(lines[at]);
  if (!opened) return null;
  const [, mark, language] = opened;
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(mark) && lines[end].trim().replaceAll(mark[0], "") === ""))
    end += 1;
  return [codeBlock(lines.slice(at + 1, end).join("\n"), language), end + 1];
}

function codeBlock(text, language) {
  const copy = make("button", "Copy");
  copy.type = "button";
  copy.className = "copy";
  copy.addEventListener("click", () => copyText(copy, text));
  const block = make("figure", make("figcaption", language || "text", copy), make("pre", make("code", text)));
  block.className = "code";
  return block;
}

async function copyText(button, text) {
  let done = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = "Not allowed here"; // browsers refuse it on pages without TLS that are not local
  }
  const before = button.textContent;
  button.textContent = done;
  setTimeout(() => (button.textContent = before), 1500);
}

function simple(lines, at) {
  const heading = HEADING.exec(lines[at]);
  // The page has headings of its own, of two levels.
  if (heading) return [make(`h${Math.min(6, heading[1].length + 2)}`, ...inline(title(heading[2]))), at + 1];
  if (RULE.test(lines[at])) return [make("hr"), at + 1];
  if (lines[at].includes("|") && at + 1 < lines.length && isColumns(lines[at + 1])) return table(lines, at);
  return null;
}

// The text of a heading without the marks that may close it, which stand behind a blank.
function title(text) {
  const shown = text.trimEnd();
  let end = shown.length;
  while (shown[end - 1] === "#") end -= 1;
  return end === 0 || /[ \t]/.test(shown[end - 1]) ? shown.slice(0, end).trimEnd() : shown;
}

// Whether a line divides the head of a table from its rows, such as |:--|--:|
function isColumns(line) {
  const row = line.trim();
  const columns = row.split("|").map((column) => column.trim());
  if (columns[0] === "") columns.shift();
  if (columns.at(-1) === "") columns.pop();
  return row.indexOf("|", 1) > 0 && columns.length > 0 && columns.every((column) => COLUMN.test(column));
}

function table(lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, name) => make("tr", ...cells(line).map((cell) => make(name, ...inline(cell))));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  const wrapper = make("div", make("table", make("thead", row(lines[at], "th")), make("tbody", ...body)));
  wrapper.className = "wide";
  return [wrapper, end];
}

function nested(lines, at, depth) {
  if (QUOTE.test(lines[at])) {
    let end = at;
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
    return [make("blockquote", ...markdown(inner.join("\n"), depth + 1)), end];
  }
  return ITEM.test(lines[at]) ? list(lines, at, depth) : null;
}

function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== ordered) break;
    const inner = [item[3]];
    for (end += 1; end < lines.length && belongs(lines, end, indent.length); end += 1)
      inner.push(lines[end].slice(Math.min(indent.length + 2, lines[end].search(/\S|$/))));
    items.push(make("li", ...unwrapped(markdown(inner.join("\n"), depth + 1))));
    while (end + 1 < lines.length && lines[end].trim() === "" && ITEM.test(lines[end + 1])) end += 1;
  }
  const made = make(ordered ? "ol" : "ul", ...items);
  if (ordered) made.start = parseInt(mark, 10);
  return [made, end];
}

// Whether a line goes on with the item above it: it is indented, or blank before an indented one.
function belongs(lines, at, indent) {
  const line = lines[at].trim() === "" ? (lines[at + 1] ?? "") : lines[at];
  return line.trim() !== "" && line.search(/\S/) >= indent + 2;
}

// The nodes of an item whose first paragraph stands beside its mark.
function unwrapped(nodes) {
  return nodes.length && nodes[0].nodeName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function paragraph(lines, at, depth) {
  const starts = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && (depth >= DEEPEST || !starts(lines[end]))) end += 1;
  return [make("p", ...inline(lines.slice(at, end).join("\n"))), end];
}

const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const LINK = /^\[([^\]\n]{1,500})\]\(<?([^\s()<>]{1,2000})>?\)/;
const ADDRESS = /^https?:\/\/[^\s<>()"'`]{1,2000}/;
const SAFE = /^(?:https?:\/\/|mailto:)/i;
const SPECIAL = /[\\`*_~[h\n]/g;

function inline(text, depth = 0) {
  const nodes = [];
  let plain = "";
  const flush = () => {
    if (plain) nodes.push(plain);
    plain = "";
  };
  for (let at = 0; at < text.length; ) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    at = next;
    if (at === text.length) break;
    const found = depth < DEEPEST ? special(text, at, depth) : null;
    if (found === null) {
      plain += text[at];
      at += 1;
    } else {
      flush();
      nodes.push(found[0]);
      at = found[1];
    }
  }
  flush();
  return nodes;
}

// The node that begins here and where it ends, or null if the character stands for itself.
function special(text, at, depth) {
  const letter = text[at];
  if (letter === "\\" && /[\\`*_~[\]()#|>-]/.test(text[at + 1] ?? "")) return [text[at + 1], at + 2];
  if (letter === "\n") return text.slice(at - 2, at) === "  " ? [make("br"), at + 1] : null;
  if (letter === "`") return codeSpan(text, at);
  if (letter === "[" || letter === "h") return link(text, at, depth);
  return marked(text, at, depth);
}

function codeSpan(text, at) {
  const mark = /^`+/.exec(text.slice(at, at + 16))[0];
  const end = text.indexOf(mark, at + mark.length);
  return end < 0 ? null : [make("code", text.slice(at + mark.length, end).trim()), end + mark.length];
}

function link(text, at, depth) {
  const rest = text.slice(at, at + 2600);
  const named = LINK.exec(rest);
  if (named) return SAFE.test(named[2]) ? [anchor(named[2], inline(named[1], depth + 1)), at + named[0].length] : null;
  const address = /\w/.test(text[at - 1] ?? "") ? null : ADDRESS.exec(rest);
  if (!address) return null;
  let end = address[0].length;
  while (".,;:!?".includes(address[0][end - 1])) end -= 1;
  const shown = address[0].slice(0, end);
  return [anchor(shown, [shown]), at + shown.length];
}

function anchor(address, children) {
  const element = make("a", ...children);
  element.href = address;
  element.rel = "noopener noreferrer nofollow";
  element.target = "_blank";
  return element;
}

function marked(text, at, depth) {
  for (const [mark, name] of MARKS) {
    if (!text.startsWith(mark, at) || /\s/.test(text[at + mark.length] ?? " ")) continue;
    if (mark[0] === "_" && /\w/.test(text[at - 1] ?? "")) continue; // snake_case
    const end = text.indexOf(mark, at + mark.length + 1);
    if (end < 0 || /\s/.test(text[end - 1]) || (mark[0] === "_" && /\w/.test(text[end + mark.length] ?? ""))) continue;
    return [make(name, ...inline(text.slice(at + mark.length, end), depth + 1)), end + mark.length];
  }
  return null;
}
