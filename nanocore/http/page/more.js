// What else can be done to the conversation that is shown: rename it, export it.
import { byId } from "./dom.js";
import { exportOne } from "./exchange.js";
import { titleOf } from "./store.js";

/** on: {shown(): the conversation, rename(title)}. */
export function startMore(on) {
  const menu = byId("more-menu");
  const dialog = byId("rename-dialog");
  menu.addEventListener("toggle", ({ newState }) => {
    const { bottom, right } = byId("more").getBoundingClientRect();
    menu.style.top = `${bottom + 4}px`;
    menu.style.right = `${document.documentElement.clientWidth - right}px`;
    byId("export-one").disabled = !on.shown().messages.length;
    if (newState === "open") byId("rename").focus();
  });
  byId("export-one").addEventListener("click", () => {
    menu.hidePopover();
    exportOne(on.shown());
  });
  byId("rename").addEventListener("click", () => {
    menu.hidePopover();
    byId("new-title").value = titleOf(on.shown());
    dialog.showModal();
    byId("new-title").select();
  });
  byId("rename-form").addEventListener("submit", () => on.rename(byId("new-title").value.trim()));
  byId("rename-cancel").addEventListener("click", () => dialog.close());
}
