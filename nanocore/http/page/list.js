// The list of conversations that are kept: to find and open one, to delete it in two presses, and to
// export and import them all.
import { announce, button, byId, el } from "./dom.js";
import { exportAll, importFile } from "./exchange.js";
import { conversations, hasText, titleOf } from "./store.js";

export class ConversationList {
  /** on: {open(conversation), remove(id), isBusy(id)}: whether an answer is coming in it. */
  constructor(on) {
    this.on = on;
    this.element = byId("conversation-list");
    this.currentId = null;
    byId("search").addEventListener("input", () => this.show(this.currentId));
    byId("export-all").addEventListener("click", () => exportAll());
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.import(event.target));
  }

  get hasFocus() {
    return this.element.contains(document.activeElement);
  }

  /** currentId: of the one that is shown. */
  show(currentId) {
    this.currentId = currentId;
    const all = conversations();
    const wanted = byId("search").value.trim();
    const found = wanted ? all.filter((conversation) => hasText(conversation, wanted)) : all;
    byId("search-found").textContent = wanted ? `${found.length} of ${all.length} have “${wanted}”.` : "";
    byId("export-all").disabled = !all.length;
    this.element.replaceChildren(...found.map((conversation) => this.entry(conversation)));
  }

  entry(conversation) {
    const title = titleOf(conversation);
    const isBusy = this.on.isBusy(conversation.id);
    const open = button(title, () => this.on.open(conversation), {
      class: isBusy ? "entry busy" : "entry",
      title: isBusy ? `${title} (a response is coming)` : title,
      "aria-current": conversation.id === this.currentId ? "true" : undefined,
      dir: "auto",
    });
    const erase = button("Delete", () => this.press(erase, conversation), {
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

  press(erase, conversation) {
    if (!erase.classList.contains("sure")) {
      erase.classList.add("sure");
      erase.textContent = "Really?";
      erase.setAttribute("aria-label", `Really delete ${titleOf(conversation)}?`);
      return;
    }
    const isCurrent = conversation.id === this.currentId;
    this.on.remove(conversation.id);
    announce("Deleted.");
    if (!isCurrent) byId("new-conversation").focus();
  }

  async import(input) {
    const [file] = input.files;
    if (!file) return;
    const note = byId("import-note");
    note.textContent = ""; // of the import before
    note.textContent = await importFile(file);
    input.value = ""; // the same file may be chosen again
    this.show(this.currentId);
  }
}
