// Elements of markdown-it's tokens. No markup is made of text, and no style attribute is set.
import { codeBlock } from "./code.js";
import { el } from "./dom.js";
import { mathElement } from "./math.js";

const DIRECTED = new Set(["P", "H3", "H4", "H5", "H6"]); // and whatever is not within another
const TASK = /^\[([ xX])\]\s+/;
const ALIGNED = /^text-align:(left|center|right)$/;

/** A fragment with the nodes of a text's tokens. isClosed: no more comes to them. */
export function build(tokens, isClosed) {
  const root = document.createDocumentFragment();
  let parent = root;
  tokens.forEach((token, i) => {
    if (token.hidden) return; // a tight list's paragraph
    if (token.nesting === -1) {
      // Now, not before: the browser looks for a letter whenever something is added to it.
      if (DIRECTED.has(parent.tagName) || token.level === 0) parent.setAttribute("dir", "auto");
      parent = parentOf(parent);
      return;
    }
    if (token.nesting === 1) {
      const [outer, inner] = opened(token, tokens, i);
      parent.append(outer);
      parent = inner;
    } else if (token.type === "inline") addInline(parent, token.children);
    else parent.append(leaf(token, isClosed));
  });
  return root;
}

/** Where to go on when an element ends; a table is in a box that scrolls. */
const parentOf = ({ tagName, parentNode }) => (tagName === "TABLE" ? parentNode.parentNode : parentNode);

function opened(token, tokens, at) {
  let element = el(token.tag, { start: token.attrGet("start") });
  if (token.type === "heading_open") {
    element = el(`h${Math.min(Number(token.tag[1]) + 2, 6)}`); // the page has the first two
  } else if (token.type === "table_open") {
    const box = el("div", { class: "table", role: "region", "aria-label": "Table", tabindex: "0" }, element);
    return [box, element];
  } else if (token.type === "list_item_open" && takesTask(tokens[at + 2])) element.classList.add("task");
  const [, side] = ALIGNED.exec(token.attrGet("style") ?? "") ?? [];
  if (side) element.classList.add(side);
  return [element, element];
}

/** Whether an entry's first text begins as "[x] ", which becomes a token of its own. */
function takesTask(inline) {
  const first = inline?.type === "inline" ? inline.children[0] : null;
  const [mark, state] = (first?.type === "text" && TASK.exec(first.content)) || [];
  if (!mark) return false;
  first.content = first.content.slice(mark.length);
  inline.children.unshift({ type: "task", nesting: 0, content: state });
  return true;
}

function leaf(token, isClosed) {
  if (token.type === "hr") return el("hr");
  if (token.type === "math") return mathElement(token);
  return codeBlock(token.content.replace(/\n$/, ""), token.info.trim(), isClosed);
}

function addInline(root, tokens) {
  let parent = root;
  for (const token of tokens) {
    if (token.nesting === -1) parent = parent.parentNode;
    else if (token.nesting === 1) {
      const element = token.type === "link_open" ? link(token.attrGet("href")) : el(token.tag);
      parent.append(element);
      parent = element;
    } else parent.append(piece(token, parent));
  }
}

function piece(token, parent) {
  switch (token.type) {
    case "code_inline":
      return el("code", { text: token.content });
    case "hardbreak":
      return el("br");
    case "softbreak":
      return "\n"; // the style sheet shows it
    case "image": {
      const words = token.content || token.attrGet("src");
      return parent.closest("a") ? words : link(token.attrGet("src"), words); // nothing is fetched
    }
    case "math":
      return mathElement(token);
    case "task": {
      const checked = token.content !== " ";
      const label = checked ? "Done" : "To do";
      return el("input", { type: "checkbox", disabled: true, checked, "aria-label": label });
    }
    default:
      return token.content;
  }
}

function link(href, text) {
  return el("a", { href, text, title: href, target: "_blank", rel: "noopener noreferrer" });
}
