// What stands within a line: code, bold, italic. A mark without its partner stays text.

const MARK = /[\\`*_]/g;
const ESCAPABLE = "\\`*_#";
const WORD = /[\p{L}\p{N}]/u;
const MAX_DEPTH = 6;
const MAX_CHARS = 50_000; // of one block; a longer one is no prose, and stays as it is

/** The nodes of a text. */
export function inline(text) {
  return text.length > MAX_CHARS ? [document.createTextNode(text)] : nodes(text, 0);
}

function nodes(text, depth) {
  const found = [];
  const missing = new Set(); // marks that have no partner from here on
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) found.push(document.createTextNode(plain));
    plain = "";
  };
  while (at < text.length) {
    MARK.lastIndex = at;
    const next = MARK.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    if (next === text.length) break;
    const span = spanAt(text, next, missing, depth);
    if (span.tag === null) plain += span.text;
    else {
      flush();
      found.push(element(span, depth));
    }
    at = span.end;
  }
  flush();
  return found;
}

function element({ tag, text }, depth) {
  const made = document.createElement(tag);
  if (tag === "code") made.textContent = text;
  else made.append(...nodes(text, depth + 1));
  return made;
}

/** What the mark at this place begins: {tag, text, end}; tag null: nothing but itself. */
function spanAt(text, at, missing, depth) {
  const mark = text[at];
  if (mark === "\\") {
    const isEscape = at + 1 < text.length && ESCAPABLE.includes(text[at + 1]);
    return { tag: null, text: isEscape ? text[at + 1] : mark, end: at + (isEscape ? 2 : 1) };
  }
  if (mark === "`") return codeAt(text, at, missing);
  const isDouble = text[at + 1] === mark;
  const run = isDouble ? mark + mark : mark;
  const itself = { tag: null, text: run, end: at + run.length };
  const inside = at + run.length;
  if (depth >= MAX_DEPTH || missing.has(run) || !opens(text, at, inside)) return itself;
  const close = isDouble ? closeOfTwo(text, inside, run) : closeOfOne(text, inside, mark);
  if (close < 0) {
    missing.add(run);
    return itself;
  }
  return {
    tag: isDouble ? "strong" : "em",
    text: text.slice(inside, close),
    end: close + run.length,
  };
}

function codeAt(text, at, missing) {
  let end = at;
  while (text[end] === "`") end += 1;
  const run = text.slice(at, end);
  const itself = { tag: null, text: run, end };
  if (missing.has(run)) return itself;
  for (let close = text.indexOf(run, end); close >= 0; close = text.indexOf(run, close)) {
    let stop = close;
    while (text[stop] === "`") stop += 1;
    if (stop - close === run.length) {
      const code = text.slice(end, close);
      const isPadded = /^ .*\S.* $/s.test(code);
      return { tag: "code", text: isPadded ? code.slice(1, -1) : code, end: stop };
    }
    close = stop;
  }
  missing.add(run);
  return itself;
}

/** 2*3*4 and snake_case_names are no emphasis. */
function opens(text, at, inside) {
  if (inside >= text.length || /\s/.test(text[inside])) return false;
  return at === 0 || !WORD.test(text[at - 1]);
}

function closes(text, at, end) {
  if (/\s/.test(text[at - 1])) return false;
  return end >= text.length || !WORD.test(text[end]);
}

function closeOfTwo(text, from, run) {
  for (let at = text.indexOf(run, from + 1); at >= 0; at = text.indexOf(run, at + 1)) {
    const isLater = text[at + 2] === run[0]; // of three, the first belongs to what is inside
    const place = isLater ? at + 1 : at;
    if (closes(text, place, place + 2)) return place;
  }
  return -1;
}

function closeOfOne(text, from, mark) {
  for (let at = text.indexOf(mark, from); at >= 0; at = text.indexOf(mark, at + 1)) {
    if (text[at + 1] === mark) at += 1; // two are another mark
    else if (at > from && closes(text, at, at + 1)) return at;
  }
  return -1;
}
