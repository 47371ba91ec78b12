// TeX in Markdown: $x$, \(x\), $$x$$ and \[x\] become MathML, by temml, which needs no fonts of its own.
// A dollar alone is money: as pandoc has it, no space follows the opening one, none is before the
// closing one, and no digit behind that; and there is none within, so an amount before a formula stays one.
import { el } from "./dom.js";

const MAX_CHARS = 5000;
const OPTIONS = { throwOnError: true, trust: false, maxSize: [50, 50], maxExpand: 500 };
const REFUSED = /\\(?:ref|eqref|label|(?:math)?[lr]lap)(?![a-zA-Z@])/; // links of the page, and overprints
const LENGTH = /([-+]?)\s*(\d*\.?\d+|\d+\.)\s*(?:e[mx]|[pb]t|[cm]m|in|mu|px|[pdcn]c|[dn]d|sp)/g;
const MIN_LENGTH = -3; // of whatever unit
const MAX_LENGTH = 100;
const WORDS = /\\(?:text\w*|mathrm|operatorname)\s*\{[^{}\\]*\}/g; // "100 cm" there is no length
const MARKS = [
  { open: "$$", close: "$$", isDisplay: true },
  { open: "\\[", close: "\\]", isDisplay: true },
  { open: "\\(", close: "\\)", isDisplay: false },
  { open: "$", close: "$", isDisplay: false },
];

/**
 * Teach a markdown-it to read formulas, as tokens "math": meta.mark, and the TeX as content.
 * env.isOpen: a block that nothing closes goes on to the end of the text, which is still to come.
 */
export function useMath(md) {
  const alt = ["paragraph", "reference", "blockquote", "list"];
  md.block.ruler.before("fence", "math", readBlock, { alt });
  md.inline.ruler.before("escape", "math", readInline);
}

const markAt = (text, at) => MARKS.find(({ open }) => text.startsWith(open, at));

/** Lines of their own, without an empty one, that begin as "$$" or "\[" and end as its partner. */
function readBlock(state, from, to, isTried) {
  const start = state.bMarks[from] + state.tShift[from];
  const mark = markAt(state.src, start);
  if (!mark?.isDisplay || state.sCount[from] - state.blkIndent >= 4) return false;
  const close = nextOf(state, mark.close, start + mark.open.length);
  const isWhole = close >= 0 && close <= start + MAX_CHARS;
  const last = isWhole ? lineOf(state, from, to, close) : lastLine(state, from, to);
  if (last === null) return false;
  if (isWhole && state.src.slice(close + mark.close.length, state.eMarks[last]).trim()) return false;
  if (isTried) return true;
  state.line = last + 1;
  const text = state.getLines(from, state.line, state.blkIndent, false).trim();
  const token = state.push("math", "", 0);
  token.content = isWhole ? text.slice(mark.open.length, -mark.close.length) : text;
  token.meta = { mark: isWhole ? mark : null };
  token.block = true;
  token.map = [from, state.line];
  return true;
}

/** The line of a place behind; null: it is in another block. */
function lineOf(state, from, to, place) {
  for (let line = from; line < to; line++) {
    if (line > from && (state.isEmpty(line) || state.sCount[line] < state.blkIndent)) return null;
    if (place < state.eMarks[line]) return line;
  }
  return null;
}

/** The last line of a block that is still to be closed; null: it cannot be any more. */
function lastLine(state, from, to) {
  if (!state.env.isOpen || from < (state.emptyLine ?? 0)) return null;
  for (let line = from + 1; line < to; line++) {
    if (!state.isEmpty(line)) continue;
    state.emptyLine = line; // of those before it none can be
    return null;
  }
  return to - 1;
}

function readInline(state, isTried) {
  const mark = markAt(state.src, state.pos);
  if (!mark) return false;
  const begin = state.pos + mark.open.length;
  const close = closeOf(state, mark, begin);
  if (close < 0) return false;
  if (!isTried) {
    const token = state.push("math", "", 0);
    token.content = state.src.slice(begin, close);
    token.meta = { mark };
  }
  state.pos = close + mark.close.length;
  return true;
}

/** Where a formula ends that begins here; -1: nowhere. */
function closeOf(state, { close, open }, begin) {
  const isDollar = open === "$";
  if (isDollar && /\s/.test(state.src[begin] ?? " ")) return -1;
  const at = nextOf(state, close, begin + 1);
  if (isDollar && (/\s/.test(state.src[at - 1]) || /[\d$]/.test(state.src[at + 1] ?? ""))) return -1;
  return at <= begin + MAX_CHARS ? at : -1;
}

/** Where a text is next that no backslash precedes. What was found is kept: no search goes over it again. */
function nextOf(state, text, from) {
  const known = ((state.found ??= {})[text] ??= { from: Infinity, at: 0 });
  if (known.from > from || (known.at >= 0 && known.at < from)) {
    known.from = from;
    known.at = state.src.indexOf(text, from);
    while (known.at >= 0 && state.src[known.at - 1] === "\\") {
      known.at = state.src.indexOf(text, known.at + 1);
    }
  }
  return known.at;
}

/** The element of a token; it shows the TeX until it is drawn, and if it cannot be. */
export function mathElement({ content, meta: { mark }, block }) {
  const text = mark ? mark.open + content + mark.close : content;
  const element = el(block ? "div" : "span", { class: "math", text });
  if (mark) draw(element, content, mark.isDisplay);
  return element;
}

/** Why a formula is not drawn, which could cover or move what is around it; null: it is. */
function reasonAgainst(tex) {
  const [command] = REFUSED.exec(tex) ?? [];
  if (command) return `${command} is not supported here`;
  for (const [length, sign, number] of tex.replace(WORDS, "").matchAll(LENGTH)) {
    const value = Number(sign + number);
    if (value < MIN_LENGTH || value >= MAX_LENGTH) return `${length.trim()} is too far`;
  }
  return null;
}

function draw(element, tex, displayMode) {
  if (globalThis.temml === undefined) {
    library().then(() => draw(element, tex, displayMode), () => {});
    return;
  }
  try {
    const reason = reasonAgainst(tex);
    if (reason) throw new Error(reason);
    const tree = globalThis.temml.__renderToMathMLTree(tex, { ...OPTIONS, displayMode });
    withoutStyleText(tree);
    element.replaceChildren(tree.toNode());
  } catch (error) {
    element.classList.add("failed");
    element.title = error.message;
  }
}

/** The content security policy refuses style attributes, and lets scripts set properties. */
function withoutStyleText(node) {
  const text = node.attributes?.style;
  if (text) {
    delete node.attributes.style;
    for (const [, name, value] of text.matchAll(/([\w-]+)\s*:\s*([^;]+)/g)) {
      node.style[name.replace(/-(\w)/g, (_, letter) => letter.toUpperCase())] = value;
    }
  }
  node.children?.forEach(withoutStyleText);
}

let loading = null;

/** Load temml, which is a script that sets a global. */
function library() {
  loading ??= new Promise((resolve, reject) => {
    const src = new URL("./libraries/temml.min.js", import.meta.url).href;
    const failed = () => {
      loading = null;
      reject(new Error("temml cannot be loaded"));
    };
    document.head.append(el("script", { src, on: { load: resolve, error: failed } }));
  });
  return loading;
}
