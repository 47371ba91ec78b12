// The conversation: what is sent, what comes back, and what the reader does to it.
//
// `conversation` is the one that is shown; `runs` are the answers that are coming, at most one in each
// conversation. They go on while another conversation is shown.
import { toServer } from "./answer.js";
import { announce, button, byId, el, fit } from "./dom.js";
import { ConversationList } from "./list.js";
import { AnswerView, isEnter, plainView } from "./message.js";
import { startMore } from "./more.js";
import { Run } from "./run.js";
import { Scroller } from "./scroller.js";
import { requestFields, SettingError, systemPrompt } from "./settings.js";
import { becomeCopy, isOvertaken, load, newConversation, remove, save, titleOf, watch } from "./store.js";

const SPOKEN_CHARS = 2000;
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
    this.isDemo = false;
    this.conversation = newConversation();
    this.runs = new Set();
    this.isCopy = false; // it became one with the last message
    this.scroller = new Scroller(byId("log"), byId("jump"));
    this.list = new ConversationList({
      open: (chosen) => this.open(chosen),
      remove: (id) => this.remove(id),
      isBusy: (id) => this.runOf(id) !== null,
    });
    startMore({ shown: () => this.conversation, rename: (title) => this.rename(title) });
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
    window.addEventListener("pagehide", () => [...this.runs].forEach((run) => run.stop()));
    watch((id) => this.takeChange(id));
    this.show();
    this.list.show(this.conversation.id);
  }

  /** The answer that is coming in a conversation; null: none. */
  runOf(id) {
    return [...this.runs].find((run) => run.conversation.id === id) ?? null;
  }

  /** The one of the conversation that is shown. */
  get run() {
    return this.runOf(this.conversation.id);
  }

  /** The model's name, once it is known. isDemo: it is nanocore's demo model. */
  setModel(id, name, isDemo) {
    this.model = id;
    this.modelName = name;
    this.isDemo = isDemo;
    if (!this.conversation.messages.length) this.show();
    for (const head of byId("log").querySelectorAll(".assistant header h3")) head.textContent = name;
  }

  /** Go to a conversation. */
  open(conversation) {
    const isSame = conversation.id === this.conversation.id && (this.run || !isOvertaken(this.conversation));
    if (!isSame) {
      this.conversation = this.runOf(conversation.id)?.conversation ?? load(conversation.id) ?? conversation;
      byId("chat-note").textContent = "";
    }
    this.show();
    this.list.show(this.conversation.id);
    this.text.focus();
  }

  /** Delete a conversation, and stop its answer, which would be kept otherwise. */
  remove(id) {
    const run = this.runOf(id);
    this.runs.delete(run);
    run?.stop();
    remove(id);
    if (id === this.conversation.id) this.open(newConversation());
    else this.list.show(this.conversation.id);
  }

  /** title: empty for the first question's beginning. */
  rename(title) {
    this.conversation.title = title || undefined;
    if (this.conversation.messages.length) this.keep(this.conversation, false);
    byId("title").textContent = titleOf(this.conversation);
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
    const { run } = this;
    run?.stop();
    return run !== null;
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
    const view = new AnswerView(this.modelName, messages.length, this.actions);
    const run = new Run(this.conversation, view, {
      grow: () => this.grow(run),
      end: (_, ending) => this.finish(run, ending),
      missing: () => this.findModel(),
    });
    this.runs.add(run);
    this.showRun(run);
    this.keep(this.conversation, false);
    announce("The response is coming.");
    run.fetch(this.body(messages, fields));
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

  grow(run) {
    if (this.run !== run) return; // it is drawn when its conversation is opened
    run.draw();
    this.scroller.follow();
  }

  finish(run, ending) {
    if (!this.runs.has(run)) return; // its conversation was deleted
    const isShown = this.run === run;
    this.runs.delete(run);
    const { conversation } = run;
    const message = run.answer.toMessage();
    conversation.messages.push(message);
    if (isShown) {
      run.draw();
      this.scroller.follow();
      this.showBusy();
    }
    // What the server has refused is no reason to let others go.
    this.keep(conversation, Boolean(message.content || message.reasoning || message.toolCalls.length));
    const words = [message.content.slice(0, SPOKEN_CHARS), ending?.text ?? ""].join(" ").trim() || "Done.";
    announce(isShown ? words : `The response in “${titleOf(conversation)}” is there.`);
  }

  /** Store a conversation; how that went is told once the answer is there. mayEvict: as `save`'s. */
  keep(conversation, mayEvict) {
    const isShown = conversation === this.conversation;
    if (isOvertaken(conversation)) {
      becomeCopy(conversation);
      if (isShown) this.isCopy = true;
    }
    const note = NOTES[save(conversation, mayEvict)];
    if (isShown) {
      byId("chat-note").textContent = [this.run ? "" : note, this.isCopy ? COPY_NOTE : ""].join(" ").trim();
      byId("title").textContent = titleOf(conversation);
    } else if (note) byId("chat-note").textContent = `“${titleOf(conversation)}”: ${note}`;
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
    const examples = this.isDemo ? DEMO_QUESTIONS : [];
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

  /** Draw the answer that is coming. */
  showRun(run) {
    run.draw();
    byId("log").append(run.view.element);
    this.scroller.toEnd();
    this.showBusy();
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
    if (this.run) this.showRun(this.run);
    this.showBusy();
    byId("title").textContent = titleOf(this.conversation);
    this.scroller.toEnd();
  }
}
