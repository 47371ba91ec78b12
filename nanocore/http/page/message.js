// How a message of the conversation looks. What a model, a tool or a user wrote is text here, or
// goes through markdown.js. actions: {edit(index, text), regenerate(index), sendResults(index,
// results)}, called by what the reader presses.
import { button, copy, count, duration, el, fit } from "./dom.js";
import { MarkdownView } from "./markdown.js";

/** A message of the user or of a tool. */
export function plainView(message, index, actions) {
  return message.role === "tool" ? toolView(message) : userView(message, index, actions);
}

function userView(message, index, actions) {
  const text = el("div", { class: "text", dir: "auto", text: message.content });
  const edit = button("Edit", () => article.replaceChildren(editor()), { class: "quiet" });
  const head = el("header", {}, el("h3", { text: "You" }), edit);
  const article = el("article", { class: "message user", "aria-label": "You" }, head, text);

  function close() {
    article.replaceChildren(head, text);
    edit.focus();
  }

  function editor() {
    const area = el("textarea", { rows: 2, "aria-label": "Edit the message", dir: "auto" });
    area.value = message.content;
    const submit = (event) => {
      event.preventDefault();
      if (area.value.trim()) actions.edit(index, area.value);
    };
    const form = el(
      "form",
      { class: "editor", on: { submit } },
      el("h3", { text: "You" }),
      area,
      el("p", { class: "hint", text: "The messages after it are replaced." }),
      el(
        "div",
        { class: "row" },
        el("button", { class: "strong", text: "Send again" }),
        button("Cancel", close),
      ),
    );
    area.addEventListener("input", () => fit(area));
    area.addEventListener("keydown", (event) => {
      if (isEnter(event)) submit(event);
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    });
    requestAnimationFrame(() => {
      fit(area);
      area.focus();
    });
    return form;
  }

  return article;
}

/** Enter alone, and not the one that ends the composition of a character. */
export function isEnter(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

function toolView(message) {
  return el(
    "article",
    { class: "message tool", "aria-label": "Tool result" },
    folded("Tool result", el("pre", { text: message.content, dir: "auto" })),
  );
}

function folded(title, ...children) {
  return el("details", {}, el("summary", { text: title }), ...children);
}

/** An answer, which may still grow: `update` shows it as it is now. */
export class AnswerView {
  constructor(name, index, actions) {
    this.index = index;
    this.actions = actions;
    this.thought = el("pre", { dir: "auto" });
    this.thinking = folded("Reasoning", this.thought);
    this.thinking.hidden = true;
    this.body = el("div", { class: "text markdown" });
    this.markdown = new MarkdownView(this.body);
    this.calls = el("div", { class: "calls" });
    this.notice = el("p", { class: "notice", hidden: true });
    this.figures = el("p", { class: "figures" });
    this.buttons = el("div", { class: "row" });
    this.element = el(
      "article",
      { class: "message assistant", "aria-label": "Answer" },
      el("header", {}, el("h3", { text: name })),
      this.thinking,
      this.body,
      this.calls,
      this.notice,
      el("footer", {}, this.figures, this.buttons),
    );
  }

  /** message: as `Answer.toMessage`. isOpen: it is still coming. isLast: it may be answered. */
  update(message, isOpen, isLast) {
    this.element.classList.toggle("open", isOpen);
    this.thinking.hidden = !message.reasoning;
    const isThinking = isOpen && !message.content && !message.toolCalls.length;
    this.thinking.firstChild.textContent = isThinking ? "Reasoning …" : "Reasoning";
    setText(this.thought, message.reasoning);
    this.markdown.update(message.content, isOpen);
    this.showCalls(message.toolCalls, isOpen, isLast);
    const ending = isOpen ? null : message.ending;
    this.notice.hidden = ending === null;
    this.notice.className = `notice ${ending?.kind ?? ""}`;
    this.notice.textContent = ending?.text ?? "";
    this.figures.replaceChildren(...(isOpen ? [] : figures(message)));
    this.buttons.replaceChildren(...(isOpen ? [] : this.offers(message, isLast)));
  }

  offers(message, isLast) {
    const found = [];
    if (message.content) {
      const copyButton = button("Copy", () => copy(message.content, this.body, copyButton), {
        class: "quiet",
      });
      found.push(copyButton);
    }
    if (isLast) {
      const again = () => this.actions.regenerate(this.index);
      found.push(button("Regenerate", again, { class: "quiet" }));
    }
    return found;
  }

  showCalls(calls, isOpen, isLast) {
    while (this.calls.children.length > calls.length) this.calls.lastChild.remove();
    calls.forEach((call, i) => {
      if (!this.calls.children[i]) {
        this.calls.append(folded("", el("pre", { class: "arguments", dir: "ltr" })));
      }
      const [summary, pre] = this.calls.children[i].children;
      setText(summary, `Calls ${call.function.name || "…"}`);
      setText(pre, isOpen ? call.function.arguments : indented(call.function.arguments));
    });
    if (calls.length && !isOpen && isLast) this.calls.append(this.resultsForm(calls));
  }

  resultsForm(calls) {
    const areas = calls.map((call) =>
      el("textarea", { rows: 2, "aria-label": `Result of ${call.function.name}`, required: true }),
    );
    const submit = (event) => {
      event.preventDefault();
      this.actions.sendResults(this.index, areas.map((area) => area.value));
    };
    const fields = calls.map((call, i) =>
      el("div", {}, el("p", { class: "hint", text: `Result of ${call.function.name}` }), areas[i]),
    );
    const send = el("button", { class: "strong", text: calls.length > 1 ? "Send the results" : "Send the result" });
    return el("form", { class: "results", on: { submit } }, ...fields, send);
  }
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // the model's, as it is
  }
}

const FINISH = {
  stop: "stop",
  length: "length",
  tool_calls: "tool calls",
};

/** What is known of an answer; counts are of tokens. */
function figures({ figures: known, finishReason }) {
  const { tokensPerS, ttftMs, promptTokens, cachedTokens, outputTokens } = known;
  const found = [];
  const add = (title, name, value, more = "") =>
    found.push(el("span", { title }, name, el("b", { text: value }), more));
  if (tokensPerS !== null) {
    add("Speed: a token is about 3/4 of a word", "", tokensPerS < 100 ? tokensPerS.toFixed(1) : count(tokensPerS), " tokens/s");
  }
  if (ttftMs !== null) add("Time until the first token came", "first token ", duration(ttftMs / 1000));
  if (promptTokens !== null) {
    const cached = cachedTokens === null ? "" : `, ${count(cachedTokens)} cached`;
    add("Tokens of the conversation; cached ones were computed before", "prompt ", count(promptTokens), cached);
  }
  if (outputTokens !== null) add("Tokens of the response", "answer ", count(outputTokens));
  if (finishReason !== null) {
    add("Why the response ended: length is the limit of tokens", "finish ", FINISH[finishReason] ?? finishReason);
  }
  return found;
}
