// The list of conversations that are kept: to open one, or to delete it in two presses.
import { announce, button, byId, el } from "./dom.js";
import { conversations, remove, titleOf } from "./store.js";

export class ConversationList {
  /** onOpen(conversation): one was chosen; null: the one that is shown is gone. */
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.element = byId("conversation-list");
  }

  get hasFocus() {
    return this.element.contains(document.activeElement);
  }

  /** currentId: of the one that is shown. */
  show(currentId) {
    this.element.replaceChildren(
      ...conversations().map((conversation) => this.entry(conversation, currentId)),
    );
  }

  entry(conversation, currentId) {
    const title = titleOf(conversation);
    const isCurrent = conversation.id === currentId;
    const open = button(title, () => this.onOpen(conversation), {
      class: "entry",
      title,
      "aria-current": isCurrent ? "true" : undefined,
      dir: "auto",
    });
    const erase = button("Delete", () => this.press(erase, conversation, currentId), {
      class: "quiet delete",
      "aria-label": `Delete ${title}`,
    });
    erase.addEventListener("blur", () => this.calm(erase, title));
    return el("li", {}, open, erase);
  }

  calm(erase, title) {
    erase.textContent = "Delete";
    erase.classList.remove("sure");
    erase.setAttribute("aria-label", `Delete ${title}`);
  }

  press(erase, conversation, currentId) {
    if (!erase.classList.contains("sure")) {
      erase.classList.add("sure");
      erase.textContent = "Really?";
      erase.setAttribute("aria-label", `Really delete ${titleOf(conversation)}?`);
      return;
    }
    const isCurrent = conversation.id === currentId;
    if (isCurrent) this.onOpen(null); // first: an answer that still comes would be kept again
    remove(conversation.id);
    announce("Deleted.");
    this.show(isCurrent ? null : currentId);
    if (!isCurrent) byId("new-conversation").focus();
  }
}
