// Conversations and settings, kept in this browser: a key of localStorage for each conversation,
// so that two tabs do not overwrite each other's. Bounded; the oldest go first.

const PREFIX = "nanocore.chat.";
const SETTINGS = "nanocore.settings";
const THEME = "nanocore.theme";
const MAX_CONVERSATIONS = 50;
const MAX_CHARS = 2_000_000; // of all; browsers give about five million
const MAX_TITLE_CHARS = 60;

export function newConversation() {
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
  return { id, updatedMs: Date.now(), messages: [] };
}

/** The first question's beginning. */
export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  const text = first?.content.trim().replace(/\s+/g, " ") ?? "";
  if (!text) return "New conversation";
  return text.length > MAX_TITLE_CHARS ? `${text.slice(0, MAX_TITLE_CHARS - 1)}…` : text;
}

/** All that are kept, the newest first; what cannot be read is left out. */
export function conversations() {
  const found = [];
  for (const key of keys()) {
    const value = read(key);
    if (typeof value?.id === "string" && Array.isArray(value.messages)) found.push(value);
  }
  return found.sort((a, b) => b.updatedMs - a.updatedMs);
}

/** Keep a conversation. False if there is no room, even without all others. */
export function save(conversation) {
  conversation.updatedMs = Date.now();
  const text = JSON.stringify(conversation);
  const others = conversations().filter((other) => other.id !== conversation.id);
  const sizes = new Map(others.map((other) => [other, size(other)]));
  let chars = text.length + [...sizes.values()].reduce((sum, one) => sum + one, 0);
  while (others.length && (others.length >= MAX_CONVERSATIONS || chars > MAX_CHARS)) {
    const oldest = others.pop();
    chars -= sizes.get(oldest);
    remove(oldest.id);
  }
  for (;;) {
    if (write(PREFIX + conversation.id, text)) return true;
    const oldest = others.pop();
    if (oldest === undefined) return false;
    remove(oldest.id);
  }
}

export function remove(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // storage is refused: there is nothing in it
  }
}

export const loadSettings = () => read(SETTINGS) ?? {};
export const saveSettings = (settings) => write(SETTINGS, JSON.stringify(settings));

/** "auto", "light" or "dark". */
export function loadTheme() {
  return document.documentElement.dataset.theme ?? "auto";
}

export function saveTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  return write(THEME, theme);
}

function keys() {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  } catch {
    return [];
  }
}

function size(conversation) {
  return JSON.stringify(conversation).length;
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

function write(key, text) {
  try {
    localStorage.setItem(key, text);
    return true;
  } catch {
    return false; // full, or refused: the caller says so
  }
}
