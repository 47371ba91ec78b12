// A small part of Markdown, as DOM: paragraphs, headings, lists, fenced code; within lines, code,
// bold and italic. Everything else (HTML, links, images, tables) stays the text that it is.
//
// Text only grows, and a block is closed by a whole line that follows it, so an update reads the
// last block again and no other. Reading is linear in the text, whatever is in it.
import { button, copy, el } from "./dom.js";
import { inline } from "./inline.js";

const FENCE = /^([ \t]*)(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^(#{1,6})[ \t]+(.*)$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(\S.*)$/;
const MAX_DEPTH = 8;

/** Shows a growing text in an element. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.text = "";
    this.start = 0; // of the last block that has a whole line, in the text
    this.last = []; // the elements of what begins there
  }

  /** text: what there was, and more. */
  update(text) {
    if (text === this.text) return;
    if (!text.startsWith(this.text)) {
      this.element.replaceChildren();
      this.start = 0;
      this.last = [];
    }
    this.text = text;
    for (const element of this.last) element.remove();
    const fresh = text.slice(this.start);
    const open = blocks(fresh.slice(0, fresh.lastIndexOf("\n") + 1)).at(-1)?.start ?? 0;
    const found = blocks(fresh);
    const closed = found.filter((block) => block.start < open);
    this.last = found.slice(closed.length).map((block) => block.build());
    this.element.append(...closed.map((block) => block.build()), ...this.last);
    this.start += open;
  }
}

/** The blocks of a text: where each starts, and what builds it. */
export function blocks(text) {
  const found = [];
  const lines = text.split("\n");
  let offset = 0;
  let at = 0;
  while (at < lines.length) {
    const read = readerOf(lines[at]);
    const begin = at;
    const start = offset;
    let build = null;
    if (read === null) at += 1;
    else [at, build] = read(lines, at);
    for (let i = begin; i < at; i++) offset += lines[i].length + 1;
    if (build !== null) found.push({ start, build });
  }
  return found;
}

function readerOf(line) {
  if (!line.trim()) return null;
  if (FENCE.test(line)) return readFence;
  if (HEADING.test(line)) return readHeading;
  return ITEM.test(line) ? readList : readParagraph;
}

function readFence(lines, begin) {
  const [, indent, fence, info] = FENCE.exec(lines[begin]);
  const code = [];
  let at = begin + 1;
  for (; at < lines.length; at++) {
    const line = lines[at].trim();
    if (line.length >= fence.length && line === fence[0].repeat(line.length)) break;
    code.push(lines[at].startsWith(indent) ? lines[at].slice(indent.length) : lines[at].trimStart());
  }
  return [Math.min(at + 1, lines.length), () => codeBlock(code.join("\n"), info.trim())];
}

function codeBlock(text, info) {
  const code = el("code", { text });
  const copyButton = button("Copy", () => copy(text, code, copyButton), { class: "quiet" });
  const language = info.split(/\s/)[0].slice(0, 24);
  const head = el("div", { class: "code-head" }, el("span", { text: language || "code" }), copyButton);
  const label = language ? `Code, ${language}` : "Code";
  const pre = el("pre", { tabindex: "0", role: "region", "aria-label": label, dir: "ltr" }, code);
  return el("div", { class: "code-block" }, head, pre);
}

function readHeading(lines, begin) {
  const [, marks, title] = HEADING.exec(lines[begin]);
  const level = Math.min(marks.length + 2, 6); // the page has the first two
  return [begin + 1, () => el(`h${level}`, { dir: "auto" }, ...inline(withoutClosing(title)))];
}

/** A title may end with marks, too: "# Title #". */
function withoutClosing(title) {
  const text = title.trimEnd();
  let end = text.length;
  while (end > 0 && text[end - 1] === "#") end -= 1;
  return end === 0 || /\s/.test(text[end - 1]) ? text.slice(0, end).trimEnd() : text;
}

function readParagraph(lines, begin) {
  let at = begin + 1;
  while (at < lines.length && readerOf(lines[at]) === readParagraph) at += 1;
  const text = lines.slice(begin, at).join("\n");
  return [at, () => el("p", { dir: "auto" }, ...inline(text))];
}

function readList(lines, begin) {
  const items = [];
  let at = begin;
  for (; at < lines.length; at++) {
    const match = ITEM.exec(lines[at]);
    const read = match ? readList : readerOf(lines[at]);
    if (match) {
      const next = item(match);
      const isOther = items.length && next.isOrdered !== items[0].isOrdered;
      if (isOther && next.indent <= items[0].indent) break;
      items.push(next);
    } else if (read === readParagraph && (lines[at - 1].trim() || /^\s/.test(lines[at]))) {
      items.at(-1).text += `\n${lines[at].trim()}`;
    } else if (read !== null || !continues(lines, at)) break;
  }
  return [at, () => list(items, 0, items.length, 0)];
}

/** Whether a list goes on behind a blank line. */
function continues(lines, blank) {
  const next = lines[blank + 1] ?? "";
  return ITEM.test(next) || (/^\s+\S/.test(next) && !FENCE.test(next));
}

function item([, indent, mark, text]) {
  const isOrdered = /\d/.test(mark);
  const width = indent.replaceAll("\t", "    ").length;
  return { indent: width, isOrdered, number: isOrdered ? Number.parseInt(mark, 10) : 0, text };
}

/** items[from..to) as a list; deeper ones are lists of the item above them. */
function list(items, from, to, depth) {
  const { isOrdered, number, indent } = items[from];
  const start = isOrdered && number !== 1 ? number : undefined;
  const element = el(isOrdered ? "ol" : "ul", { start, dir: "auto" });
  for (let at = from; at < to; ) {
    let next = at + 1;
    if (depth < MAX_DEPTH) while (next < to && items[next].indent > indent + 1) next += 1;
    const entry = el("li", { dir: "auto" }, ...inline(items[at].text));
    if (next > at + 1) entry.append(list(items, at + 1, next, depth + 1));
    element.append(entry);
    at = next;
  }
  return element;
}
