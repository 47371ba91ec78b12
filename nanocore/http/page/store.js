// Conversations and settings, kept in this browser: a key of localStorage for each conversation.
//
// Bounded: the oldest go first, and only where that makes the room that is needed. Two tabs may have
// the same conversation: `isOvertaken` says that another one has written it since. Storage is shared
// with all programs of this address: it may be full of theirs, and nothing of theirs is touched.
import { isConversation } from "./kept.js";

const PREFIX = "nanocore.chat.";
const SETTINGS = "nanocore.settings";
const THEME = "nanocore.theme";
const PROBE = "nanocore.room";
const MAX_CONVERSATIONS = 50;
export const MAX_CHARS = 2_000_000; // of all, keys included; browsers give about five million
const MAX_TITLE_CHARS = 60;

function newId() {
  return `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
}

export function newConversation() {
  return { id: newId(), updatedMs: Date.now(), messages: [] };
}

/** Give a conversation an id of its own, under which it is not kept yet. */
export function becomeCopy(conversation) {
  conversation.id = newId();
}

/** The name that the reader gave, or the first question's beginning. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.messages.find((message) => message.role === "user");
  const text = first?.content.trim().replace(/\s+/g, " ") ?? "";
  if (!text) return "New conversation";
  return text.length > MAX_TITLE_CHARS ? `${text.slice(0, MAX_TITLE_CHARS - 1)}…` : text;
}

/** All that are kept, the newest first; what cannot be read is left out. */
export function conversations() {
  return entries().map((entry) => entry.conversation).filter((one) => one !== null);
}

/** The one with this id, as it is kept; null: there is none. */
export function load(id) {
  const value = read(PREFIX + id);
  return isConversation(value, id) ? value : null;
}

/** Whether a conversation's title or a message of it has a text, in any case of letters. */
export function hasText(conversation, text) {
  const wanted = text.toLowerCase();
  const texts = [titleOf(conversation), ...conversation.messages.map((message) => message.content)];
  return texts.some((one) => one.toLowerCase().includes(wanted));
}

/** Whether what is kept of a conversation is not what this tab has read or written last. */
export function isOvertaken(conversation) {
  const kept = load(conversation.id);
  return kept !== null && kept.updatedMs !== conversation.updatedMs;
}

/**
 * Keep a conversation. mayEvict: others may go for it, the oldest first. updatedMs: its age for that.
 * Says how it went:
 * "kept", "large": it is larger than all may be, or "full": there is no room. Unless it is kept,
 * nothing has changed, and what was kept of it before still is.
 */
export function save(conversation, mayEvict, updatedMs = Date.now()) {
  const key = PREFIX + conversation.id;
  const text = JSON.stringify({ ...conversation, updatedMs });
  if (key.length + text.length > MAX_CHARS) return "large";
  const others = entries().filter((other) => other.key !== key);
  if (!isWithinBounds({ key, text }, others) || !write(key, text)) {
    const victims = mayEvict ? victimsFor({ key, text }, others) : null;
    if (victims === null) return "full";
    for (const victim of victims) erase(victim.key);
    if (!write(key, text)) {
      for (const victim of victims) write(victim.key, victim.text); // they had room before
      return "full";
    }
  }
  conversation.updatedMs = updatedMs;
  return "kept";
}

function isWithinBounds(entry, others) {
  const chars = others.reduce((sum, other) => sum + sizeOf(other), sizeOf(entry));
  return others.length < MAX_CONVERSATIONS && chars <= MAX_CHARS;
}

/** Which of the others (the newest first) have to go, as few as will do; null: all are too few. */
function victimsFor(entry, others) {
  const left = [...others];
  const victims = [];
  let missing = sizeOf(entry) - keptSize(entry.key); // characters, without those that go
  while (!isWithinBounds(entry, left) || !hasRoom(missing)) {
    const oldest = left.pop();
    if (oldest === undefined) return null;
    victims.push(oldest);
    missing -= sizeOf(oldest);
  }
  return victims;
}

/** Whether the browser takes so many characters more: only trying it tells. */
function hasRoom(chars) {
  if (chars <= 0) return true;
  const isTaken = write(PROBE, "x".repeat(Math.max(0, chars - PROBE.length)));
  erase(PROBE);
  return isTaken;
}

export function remove(id) {
  erase(PREFIX + id);
}

/** Call onChange(id) when another tab changed a conversation; null: perhaps all of them. */
export function watch(onChange) {
  window.addEventListener("storage", ({ key }) => {
    if (key === null) onChange(null);
    else if (key.startsWith(PREFIX)) onChange(key.slice(PREFIX.length));
  });
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

/** Each key of ours as {key, text, conversation}, the newest first; null: cannot be read, the oldest. */
function entries() {
  const age = ({ conversation }) => conversation?.updatedMs ?? -Infinity;
  return keys()
    .map((key) => ({ key, text: textOf(key) ?? "", conversation: load(key.slice(PREFIX.length)) }))
    .sort((a, b) => (age(a) === age(b) ? 0 : age(b) - age(a)));
}

function keys() {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  } catch {
    return [];
  }
}

const sizeOf = ({ key, text }) => key.length + text.length;

function keptSize(key) {
  const text = textOf(key);
  return text === null ? 0 : key.length + text.length;
}

function textOf(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
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

function erase(key) {
  try {
    localStorage.removeItem(key);
  } catch {
    // storage is refused: there is nothing in it
  }
}
