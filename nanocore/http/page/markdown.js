// GitHub's Markdown as DOM, by markdown-it. HTML in a text stays text.
//
// Text only grows, and a block is closed by a whole line that follows it, so an update reads the
// last block again and no other. Reading is linear in the text, whatever is in it. A browser takes
// seconds for a hundred thousand elements, so from the block on that exceeds a budget all is plain text.
import MarkdownIt from "./libraries/markdown-it.esm.min.mjs";
import { el } from "./dom.js";
import { useMath } from "./math.js";
import { build } from "./render.js";

const MAX_INLINE_CHARS = 20_000; // of one block; a longer one is no prose, and stays as it is
const MAX_LEVEL = 60; // of tokens: about thirty lists in each other
const MAX_WEIGHT = 20_000; // of a message
const PLAIN_NOTE = "Shown as plain text from here on: too much to format.";
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
// Before anything inline is read, which much of would take its time, and once its elements are known.
md.core.ruler.before("inline", "budget_of_blocks", keepBudget);
md.core.ruler.push("budget", keepBudget);

/** Leave out the blocks that are too much. env: weight of all until here, plainLine: of the first. */
function keepBudget({ tokens, env }) {
  let weight = env.weightBefore;
  let block = 0;
  for (const [at, token] of tokens.entries()) {
    if (token.level === 0 && token.nesting >= 0) block = at;
    weight += weightOf(token);
    if (weight <= MAX_WEIGHT) continue;
    env.plainLine = tokens[block].map[0];
    tokens.length = block;
    return;
  }
  env.weight = weight;
}

/** About how many elements a token becomes. */
function weightOf({ type, content, children, meta }) {
  if (type === "fence" || type === "code_block") return 20; // with its button and its colours
  if (type === "math") return meta.mark ? 5 + content.length / 4 : 1;
  return (children ?? []).reduce((sum, child) => sum + weightOf(child), 1);
}

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
    this.weight = 0; // of closed blocks
    this.plain = null; // the text node of what is too much
  }

  /** text: what there was, and more. isOpen: more may come. */
  update(text, isOpen) {
    const normal = text.replace(/\r\n?/g, "\n");
    if (normal === this.text && isOpen === this.isOpen) return;
    // A link may stand before its target, in a block that was closed without it; and only at its end
    // is it certain what a block weighs.
    const isProvisional = Object.keys(this.references).length > 0 || this.plain !== null;
    if (!normal.startsWith(this.text) || (!isOpen && isProvisional)) this.reset();
    this.plain?.appendData(normal.slice(this.text.length));
    this.text = normal;
    this.isOpen = isOpen;
    if (this.plain) return;
    for (const element of this.last) element.remove();
    if (isOpen) this.close();
    if (this.plain) return;
    const env = { isOpen, references: { ...this.references } };
    this.last = this.add(normal.length, env);
    if (isOpen || this.start === 0 || Object.keys(env.references).length === 0) return;
    this.reset(); // the last block had the target
    this.update(text, isOpen);
  }

  /** Show for good the blocks before the last one that has a whole line. */
  close() {
    const fresh = this.text.slice(this.start);
    const blocks = [];
    md.block.parse(fresh.slice(0, fresh.lastIndexOf("\n") + 1), md, { isOpen: true }, blocks);
    const line = blocks.findLast((token) => token.level === 0 && token.nesting >= 0)?.map[0] ?? 0;
    if (line === 0) return;
    const end = this.start + startOfLine(fresh, line);
    const env = { references: this.references };
    this.add(end, env);
    this.weight = env.weight;
    this.start = end;
  }

  /** Show the blocks from `start` to an end, and what is too much as plain text. Returns the elements. */
  add(end, env) {
    const fresh = this.text.slice(this.start, end);
    env.weightBefore = this.weight;
    const nodes = build(md.parse(fresh, env), !env.isOpen);
    if (env.plainLine !== undefined) {
      this.plain = new Text(this.text.slice(this.start + startOfLine(fresh, env.plainLine)));
      nodes.append(el("p", { class: "hint", text: PLAIN_NOTE }), el("div", { class: "plain", dir: "auto" }, this.plain));
    }
    const added = [...nodes.childNodes];
    this.element.append(nodes);
    return added;
  }
}

function startOfLine(text, line) {
  let at = 0;
  for (let i = 0; i < line; i++) at = text.indexOf("\n", at) + 1;
  return at;
}
