// The page: which view is shown, which panels are open, the theme, the key, the model's name.
import { ApiError, askForKey, hasKey, keyEvents, requestJson } from "./api.js";
import { Chat } from "./chat.js";
import { announce, byId, el } from "./dom.js";
import { LiveView } from "./live.js";
import { setServed, startSettings } from "./settings.js";
import { loadTheme, saveTheme } from "./store.js";

const RETRY_S = 3;
const MAX_RETRY_S = 60; // whatever the server says
const PANELS = ["conversations", "settings"];
const DEMO_NAME = "nanocore_demo_model"; // of its folder, whatever it is served as
const THEMES = ["auto", "light", "dark"]; // auto: as the system has it

startSettings();
const live = new LiveView();
const chat = new Chat(showSetting, findModel);

function showSetting(field, message) {
  setPanel("settings", true);
  field.focus();
  say(message);
}

// -- views ----------------------------------------------------------------------------------------

function showView() {
  const isLive = location.hash === "#live";
  byId("chat").hidden = isLive;
  byId("live").hidden = !isLive;
  for (const [id, isCurrent] of [["to-chat", !isLive], ["to-live", isLive]]) {
    if (isCurrent) byId(id).setAttribute("aria-current", "page");
    else byId(id).removeAttribute("aria-current");
  }
  live.setShown(isLive);
}

window.addEventListener("hashchange", showView);
showView();
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  if (location.hash === "#live") byId("steps").focus();
  else byId("composer-text").focus();
});

// -- panels ---------------------------------------------------------------------------------------

function setPanel(name, isOpen) {
  const panel = byId(name);
  const opener = byId(`show-${name}`);
  const had = panel.contains(document.activeElement);
  if (name === "settings") panel.hidden = !isOpen;
  panel.classList.toggle("open", isOpen);
  opener.setAttribute("aria-expanded", String(isOpen));
  if (isOpen) panel.querySelector("textarea, #new-conversation").focus();
  else if (had && getComputedStyle(opener).display !== "none") opener.focus();
}

for (const name of PANELS) {
  byId(`show-${name}`).addEventListener("click", () => {
    setPanel(name, !byId(name).classList.contains("open"));
  });
}
for (const close of document.querySelectorAll("[data-closes]")) {
  close.addEventListener("click", () => setPanel(close.dataset.closes, false));
}
byId("conversations").addEventListener("click", (event) => {
  if (event.target.closest(".entry, #new-conversation")) setPanel("conversations", false);
});

// Escape is for what is seen: the panel where the reader is, then the answer, then any panel.
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (byId("chat").hidden || document.querySelector("dialog[open], :popover-open")) return;
  const open = PANELS.filter((name) => byId(name).classList.contains("open"));
  const here = open.filter((name) => byId(name).contains(document.activeElement));
  if (!here.length && chat.stop()) return;
  for (const name of here.length ? here : open) setPanel(name, false);
});

// -- theme ----------------------------------------------------------------------------------------

function showTheme() {
  const theme = loadTheme();
  byId("theme").replaceChildren(el("span", { text: "Theme: " }), theme);
  byId("theme").setAttribute("aria-label", `Theme: ${theme}`);
}

byId("theme").addEventListener("click", () => {
  saveTheme(THEMES[(THEMES.indexOf(loadTheme()) + 1) % THEMES.length]);
  showTheme();
  announce(`Theme: ${loadTheme()}`);
});
showTheme();

// -- the server -----------------------------------------------------------------------------------

function say(text) {
  byId("banner").textContent = text;
}

byId("change-key").hidden = !hasKey();
byId("change-key").addEventListener("click", () => askForKey(""));
keyEvents.addEventListener("given", () => {
  findModel();
  live.takeKey();
});

let finding = null;
let later = 0;

/** Ask what is served, until there is an answer; a model may still be loading. */
function findModel() {
  finding ??= askForModel().finally(() => (finding = null));
}

async function askForModel() {
  clearTimeout(later);
  try {
    const model = (await requestJson("v1/models")).data?.[0];
    if (typeof model?.id !== "string") throw new ApiError("the server names no model", 0);
    const name = model.id.replace(/\/+$/, "").split("/").pop();
    byId("model").textContent = name;
    byId("model").title = `${model.id}, up to ${model.max_model_len} tokens`;
    const root = typeof model.root === "string" ? model.root : model.id;
    chat.setModel(model.id, name, root.replace(/\/+$/, "").split("/").pop() === DEMO_NAME);
    setServed(name, model.default_sampling);
    say("");
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    say(error.words);
    if (error.status !== 0 && error.status !== 503) return;
    const seconds = Math.min(Math.max(error.retryAfterS ?? RETRY_S, 1), MAX_RETRY_S);
    later = setTimeout(findModel, seconds * 1000);
  }
}

findModel();
