// GitHub's Markdown as DOM, by markdown-it. HTML in a text stays text.
//
// Text only grows, and a block is closed by a whole line that follows it, so an update reads the
// last block again and no other. Reading is linear in the text, whatever is in it.
import MarkdownIt from "./libraries/markdown-it.esm.min.mjs";
import { useMath } from "./math.js";
import { build } from "./render.js";

const MAX_INLINE_CHARS = 20_000; // of one block; a longer one is no prose, and stays as it is
const MAX_LEVEL = 60; // of tokens: about thirty lists in each other
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

const md = new MarkdownIt({ html: false, linkify: true });
md.validateLink = (url) => URL.canParse(url) && SCHEMES.has(new URL(url).protocol);
// "main.py" is a file, though .py is a country.
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
useMath(md);
// Where too much is nested, markdown-it would leave out whatever follows: a line stays as it is there.
md.block.ruler.before("table", "deep", (state, from, _, isTried) => {
  if (state.level < MAX_LEVEL || isTried) return false;
  const token = state.push("code_block", "code", 0);
  token.content = state.src.slice(state.bMarks[from] + state.tShift[from], state.eMarks[from]);
  token.map = [from, from + 1];
  state.line = from + 1;
  return true;
});
md.core.ruler.at("inline", (state) => {
  for (const token of state.tokens) {
    if (token.type !== "inline") continue;
    if (token.content.length <= MAX_INLINE_CHARS) {
      md.inline.parse(token.content, md, state.env, token.children);
    } else {
      const text = new state.Token("text", "", 0);
      text.content = token.content;
      token.children = [text];
    }
  }
});

/** Shows a growing text in an element. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.reset();
  }

  reset() {
    this.element.replaceChildren();
    this.text = "";
    this.isOpen = true;
    this.start = 0; // of the last block that has a whole line, in the text
    this.last = []; // the elements of what begins there
    this.references = {}; // link targets that closed blocks define
  }

  /** text: what there was, and more. isOpen: more may come. */
  update(text, isOpen) {
    const normal = text.replace(/\r\n?/g, "\n");
    if (normal === this.text && isOpen === this.isOpen) return;
    // A link may stand before its target, in a block that was closed without it.
    const hasReferences = Object.keys(this.references).length > 0;
    if (!normal.startsWith(this.text) || (!isOpen && hasReferences)) this.reset();
    this.text = normal;
    this.isOpen = isOpen;
    for (const element of this.last) element.remove();
    if (isOpen) this.close();
    const env = { isOpen, references: { ...this.references } };
    const fresh = build(md.parse(normal.slice(this.start), env), !isOpen);
    this.last = [...fresh.childNodes];
    this.element.append(fresh);
  }

  /** Show for good the blocks before the last one that has a whole line. */
  close() {
    const fresh = this.text.slice(this.start);
    const blocks = [];
    md.block.parse(fresh.slice(0, fresh.lastIndexOf("\n") + 1), md, { isOpen: true }, blocks);
    const line = blocks.findLast((token) => token.level === 0 && token.nesting >= 0)?.map[0] ?? 0;
    if (line === 0) return;
    const end = startOfLine(fresh, line);
    const env = { references: this.references };
    this.element.append(build(md.parse(fresh.slice(0, end), env), true));
    this.start += end;
  }
}

function startOfLine(text, line) {
  let at = 0;
  for (let i = 0; i < line; i++) at = text.indexOf("\n", at) + 1;
  return at;
}
