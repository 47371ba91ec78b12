// The conversation: what is sent, what comes back, and what the reader does to it.
//
// `conversation` is what is kept; `run` is the one answer that is coming, if any. A run belongs to
// the conversation in which it began: leaving that stops it.
import { Answer, toServer } from "./answer.js";
import { ApiError, BrokenConnection, readEvents, request } from "./api.js";
import { announce, button, byId, el, fit } from "./dom.js";
import { ConversationList } from "./list.js";
import { AnswerView, isEnter, plainView } from "./message.js";
import { Scroller } from "./scroller.js";
import { requestFields, SettingError, systemPrompt, useChatml } from "./settings.js";
import { copyOf, isOvertaken, load, newConversation, save, titleOf, watch } from "./store.js";

const SPOKEN_CHARS = 2000;
const DEMO_NAME = "nanocore_demo_model";
const DEMO_QUESTIONS = ["What is 123 + 456?", "Sort: pear apple fig", "Count from 7 to 12."];
const NOTES = {
  kept: "",
  large: "This conversation is too long to store: new messages are lost when you leave it.",
  full: "The browser’s storage is full: new messages are lost when you leave this conversation.",
};
const COPY_NOTE = "Another tab continued this conversation: it continues here as a copy.";

export class Chat {
  /**
   * showSettings: opens the settings, where a field of theirs is wrong. findModel: asks the server
   * for its model, which may be another one by now.
   */
  constructor(showSettings, findModel) {
    this.showSettings = showSettings;
    this.findModel = findModel;
    this.modelName = "Answer";
    this.model = null;
    this.conversation = newConversation();
    this.run = null;
    this.isCopy = false; // it became one with the last message
    this.scroller = new Scroller(byId("log"), byId("jump"));
    this.list = new ConversationList((chosen) => this.open(chosen));
    this.text = byId("composer-text");
    this.actions = {
      edit: (index, text) => this.ask(index, [{ role: "user", content: text }]),
      regenerate: (index) => this.ask(index, []),
      sendResults: (index, results) => this.sendResults(index, results),
    };
    byId("new-conversation").addEventListener("click", () => this.open(newConversation()));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.run) this.stop();
      else this.send();
    });
    this.text.addEventListener("input", () => fit(this.text));
    this.text.addEventListener("keydown", (event) => {
      if (!isEnter(event)) return;
      event.preventDefault();
      if (!this.run) this.send();
    });
    window.addEventListener("pagehide", () => this.stop());
    watch((id) => this.takeChange(id));
    this.show();
    this.list.show(this.conversation.id);
  }

  /** The model's name, once it is known. */
  setModel(id, name) {
    this.model = id;
    this.modelName = name;
    if (!this.conversation.messages.length) this.show();
    for (const head of byId("log").querySelectorAll(".assistant header h3")) head.textContent = name;
  }

  /** Go to a conversation; null: to a new one. */
  open(conversation) {
    this.stop();
    const isSame = conversation?.id === this.conversation.id && !isOvertaken(this.conversation);
    if (!isSame) {
      this.conversation = conversation === null ? newConversation() : (load(conversation.id) ?? conversation);
      byId("chat-note").textContent = "";
    }
    this.show();
    this.list.show(this.conversation.id);
    this.text.focus();
  }

  send() {
    const content = this.text.value;
    if (!content.trim()) return;
    const isSent = this.ask(this.conversation.messages.length, [{ role: "user", content }]);
    if (!isSent) return;
    this.text.value = "";
    fit(this.text);
  }

  sendResults(index, results) {
    const calls = this.conversation.messages[index].toolCalls;
    const messages = results.map((content, i) => ({ role: "tool", content, toolCallId: calls[i].id }));
    this.ask(index + 1, messages);
  }

  /** Stop the answer that is coming; what has come is kept. */
  stop() {
    if (!this.run) return false;
    this.run.abort.abort();
    this.finish(this.run, { kind: "stopped", text: "Stopped." });
    return true;
  }

  /** Let the conversation have `length` messages, then these, then an answer. False: it cannot. */
  ask(length, added) {
    let fields;
    try {
      fields = requestFields();
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      this.showSettings(error.field, error.message);
      return false;
    }
    this.stop();
    this.isCopy = false;
    this.leaveLog();
    const { messages } = this.conversation;
    messages.splice(length, messages.length, ...added);
    this.show();
    const answer = new Answer();
    const view = new AnswerView(this.modelName, messages.length, this.actions);
    const run = { answer, view, abort: new AbortController(), frame: null };
    this.run = run;
    view.update(answer.toMessage(), true, true);
    byId("log").append(view.element);
    this.scroller.toEnd();
    this.showBusy();
    this.keep(false);
    announce("The response is coming.");
    this.fetchAnswer(run, this.body(messages, fields));
    return true;
  }

  body(messages, fields) {
    const system = systemPrompt();
    const turns = messages.map(toServer).filter((turn) => turn !== null);
    if (system) turns.unshift({ role: "system", content: system });
    const model = this.model === null ? {} : { model: this.model };
    const stream = { stream: true, stream_options: { include_usage: true } };
    return { ...model, messages: turns, ...stream, ...fields };
  }

  async fetchAnswer(run, body) {
    let ending = null;
    try {
      const { signal } = run.abort;
      const onSend = () => (run.answer.startedMs = performance.now());
      const post = (fields) => request("v1/chat/completions", { body: { ...body, ...fields }, signal, onSend });
      const response = await post({}).catch((error) => {
        if (error.param !== "chat_template" || body.chat_template) throw error;
        return post(useChatml());
      });
      const isWhole = await readEvents(response, (chunk) => {
        if (run.answer.add(chunk, performance.now())) this.showSoon(run);
      });
      if (!isWhole) ending = { kind: "incomplete", text: "Incomplete: the stream ended before the response did." };
    } catch (error) {
      ending = endingOf(error);
      if (error.status === 404) this.findModel();
      if (ending === null) {
        this.finish(run, { kind: "failed", text: `This page failed: ${error.message}` });
        throw error;
      }
    }
    this.finish(run, ending);
  }

  /** Draw what has come, once for all that comes before the next frame. */
  showSoon(run) {
    run.frame ??= requestAnimationFrame(() => {
      run.frame = null;
      if (this.run !== run) return;
      run.view.update(run.answer.toMessage(), true, true);
      this.scroller.follow();
    });
  }

  finish(run, ending) {
    if (this.run !== run) return; // it was stopped, and has been finished
    this.run = null;
    run.answer.ending = ending;
    const message = run.answer.toMessage();
    this.conversation.messages.push(message);
    run.view.update(message, false, true);
    this.scroller.follow();
    this.showBusy();
    // What the server has refused is no reason to let others go.
    this.keep(Boolean(message.content || message.reasoning || message.toolCalls.length));
    announce([message.content.slice(0, SPOKEN_CHARS), ending?.text ?? ""].join(" ").trim() || "Done.");
  }

  /** Store the conversation; how that went is told once the answer is there. mayEvict: as `save`'s. */
  keep(mayEvict) {
    if (isOvertaken(this.conversation)) {
      this.conversation = copyOf(this.conversation);
      this.isCopy = true;
    }
    const notes = [NOTES[save(this.conversation, mayEvict)], COPY_NOTE];
    if (this.run) notes[0] = "";
    if (!this.isCopy) notes[1] = "";
    byId("chat-note").textContent = notes.join(" ").trim();
    byId("title").textContent = titleOf(this.conversation);
    this.list.show(this.conversation.id);
  }

  /** Another tab changed this conversation, or (null) perhaps any. What is being written here stays. */
  takeChange(id) {
    if (!this.list.hasFocus) this.list.show(this.conversation.id);
    const isOther = id !== null && id !== this.conversation.id;
    if (isOther || this.run || this.isBeingWritten() || !isOvertaken(this.conversation)) return;
    this.leaveLog();
    this.conversation = load(this.conversation.id);
    this.scroller.around(() => this.show());
  }

  isBeingWritten() {
    const areas = [...byId("log").querySelectorAll("textarea")];
    return areas.some((area) => area.closest(".editor") || area.value !== "");
  }

  /** What has the focus there goes away. */
  leaveLog() {
    if (byId("log").contains(document.activeElement)) this.text.focus();
  }

  showBusy() {
    const isBusy = this.run !== null;
    const send = byId("send");
    send.textContent = isBusy ? "Stop" : "Send";
    send.classList.toggle("stops", isBusy);
    byId("log").setAttribute("aria-busy", String(isBusy));
  }

  welcome() {
    const examples = this.modelName === DEMO_NAME ? DEMO_QUESTIONS : [];
    const buttons = examples.map((question) =>
      button(question, () => {
        this.text.value = question;
        this.send();
      }),
    );
    const words = examples.length
      ? "This is the small demo model. It knows tasks such as these:"
      : "Ask the model something.";
    return el("div", { class: "welcome" }, el("p", { text: words }), el("div", { class: "row" }, ...buttons));
  }

  /** Draw the whole conversation. */
  show() {
    const { messages } = this.conversation;
    const views = messages.map((message, index) => {
      if (message.role !== "assistant") return plainView(message, index, this.actions);
      const view = new AnswerView(this.modelName, index, this.actions);
      view.update(message, false, index === messages.length - 1);
      return view.element;
    });
    byId("log").replaceChildren(...(views.length ? views : [this.welcome()]));
    byId("title").textContent = titleOf(this.conversation);
    this.scroller.toEnd();
  }
}

/** null: the error is the page's own. */
function endingOf(error) {
  if (error.name === "AbortError") return { kind: "stopped", text: "Stopped." };
  if (error instanceof ApiError) return { kind: "failed", text: error.words };
  if (error instanceof BrokenConnection) {
    return { kind: "incomplete", text: `Incomplete: the connection broke (${error.message}).` };
  }
  return null;
}
