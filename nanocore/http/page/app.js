// The page: which view is shown, which panels are open, the theme, the key, the model's name.
import { ApiError, askForKey, request } from "./api.js";
import { Chat } from "./chat.js";
import { announce, byId, el } from "./dom.js";
import { LiveView } from "./live.js";
import { startSettings } from "./settings.js";
import { loadTheme, saveTheme } from "./store.js";

const RETRY_S = 3;
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

for (const name of ["conversations", "settings"]) {
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

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (chat.stop()) return;
  for (const name of ["conversations", "settings"]) {
    if (byId(name).classList.contains("open")) setPanel(name, false);
  }
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

byId("change-key").addEventListener("click", async () => {
  if (await askForKey("")) findModel();
});

/** Ask what is served, until there is an answer; a model may still be loading. */
async function findModel() {
  try {
    const { data } = await (await request("v1/models")).json();
    const name = data[0].id.replace(/\/+$/, "").split("/").pop();
    byId("model").textContent = name;
    byId("model").title = `${data[0].id}, up to ${data[0].max_model_len} tokens`;
    chat.setModel(data[0].id, name);
    say("");
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    say(error.words);
    if (error.status === 0 || error.status === 503) {
      setTimeout(findModel, (error.retryAfterS ?? RETRY_S) * 1000);
    }
  }
}

findModel();
