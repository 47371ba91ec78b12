// A block of code: its language, a button that copies it, and colours once it is whole.
import { button, copy, el } from "./dom.js";

const MAX_LANGUAGE_CHARS = 24;
const MAX_COLOURED_CHARS = 100_000;

/** isClosed: no more comes to it. */
export function codeBlock(text, info, isClosed) {
  const code = el("code", { text });
  const copyButton = button("Copy", () => copy(text, code, copyButton), { class: "quiet" });
  const language = info.split(/\s/)[0].slice(0, MAX_LANGUAGE_CHARS);
  const head = el("div", { class: "code-head" }, el("span", { text: language || "code" }), copyButton);
  const label = language ? `Code, ${language}` : "Code";
  const pre = el("pre", { tabindex: "0", role: "region", "aria-label": label, dir: "ltr" }, code);
  if (isClosed && language && text.length <= MAX_COLOURED_CHARS) colour(code, text, language);
  return el("div", { class: "code-block" }, head, pre);
}

/** Give code its colours; without the library it stays as it is. */
async function colour(code, text, language) {
  const library = await import("./libraries/highlight.min.js").catch(() => null);
  if (!library?.default.getLanguage(language)) return;
  const found = library.default.highlight(text, { language, ignoreIllegals: true });
  code.replaceChildren(...found._emitter.rootNode.children.map(coloured));
}

/** A node of highlight.js: a text, or a part with a scope, as "title.function". */
function coloured(node) {
  if (typeof node === "string") return node;
  const [scope] = (node.scope ?? "").split(".");
  return el("span", { class: scope && `hljs-${scope}` }, ...node.children.map(coloured));
}
