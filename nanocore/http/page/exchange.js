// Conversations as files: one as Markdown, all as JSON, and that JSON read again.
import { count, el } from "./dom.js";
import { MAX_TITLE_CHARS, hasLongTitle, isShaped } from "./kept.js";
import { MAX_CHARS, becomeCopy, conversations, load, save, titleOf } from "./store.js";

const FORMAT = "nanocore.conversations";
const MAX_BYTES = 10_000_000; // storage has less
const DOWNLOAD_MS = 60_000;
const MAX_ID_CHARS = 100;
const MAX_NAME_CHARS = 40;

export function exportAll() {
  const all = { format: FORMAT, version: 1, conversations: conversations() };
  download("conversations.json", "application/json", JSON.stringify(all, null, 1));
}

export function exportOne(conversation) {
  const title = titleOf(conversation);
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, MAX_NAME_CHARS);
  const parts = [`# ${title}`, ...conversation.messages.flatMap(partsOf)];
  download(`${name || "conversation"}.md`, "text/markdown", `${parts.join("\n\n")}\n`);
}

function partsOf({ role, content, reasoning, toolCalls = [], ending }) {
  const heads = { user: "## You", assistant: "## Answer", tool: "## Tool result" };
  const calls = toolCalls.map((call) => fenced(`${call.function.name}(${call.function.arguments})`));
  const thought = reasoning ? reasoning.trim().replace(/^/gm, "> ") : "";
  const note = ending ? `*${ending.text}*` : "";
  const text = role === "tool" ? fenced(content) : content;
  return [heads[role], thought, text, ...calls, note].filter((part) => part !== "");
}

/** With a fence that is longer than any within. */
function fenced(text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}\n${fence}`;
}

function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), DOWNLOAD_MS);
}

/** Keep the conversations of a file beside those that are here. Says how that went. */
export async function importFile(file) {
  if (file.size > MAX_BYTES) return `Not imported: ${file.name} is larger than ${MAX_BYTES / 1e6} MB.`;
  const found = readExport(await file.text());
  if (found === null) return `Not imported: ${file.name} is no export of this page’s conversations.`;
  if (found.some(hasLongTitle)) {
    return `Not imported: a title in ${file.name} is longer than ${MAX_TITLE_CHARS} characters.`;
  }
  const counts = { kept: 0, same: 0, full: 0, large: 0 };
  for (const conversation of found) counts[keepBeside(conversation)] += 1;
  const parts = [`Imported ${counts.kept}.`];
  if (counts.same) parts.push(`${counts.same} were here already.`);
  if (counts.full) parts.push(`No room for ${counts.full}.`);
  if (counts.large) parts.push(`${counts.large} longer than ${count(MAX_CHARS)} characters.`);
  return parts.join(" ");
}

/** null: the text is something else, or anything in it is broken. */
function readExport(text) {
  let value = null;
  try {
    value = JSON.parse(text);
  } catch {
    return null;
  }
  if (value?.format !== FORMAT || value.version !== 1 || !Array.isArray(value.conversations)) return null;
  const isId = (id) => typeof id === "string" && /^[\w-]+$/.test(id) && id.length <= MAX_ID_CHARS;
  const isGood = (one) => isShaped(one, one?.id) && isId(one.id);
  if (!value.conversations.every(isGood)) return null;
  return value.conversations.map(({ id, updatedMs, title, messages }) => ({ id, updatedMs, title, messages }));
}

/** What is here stays: of two with one id, the other gets a new one. */
function keepBeside(conversation) {
  const here = load(conversation.id);
  if (here !== null) {
    const isSame = here.title === conversation.title && JSON.stringify(here.messages) === JSON.stringify(conversation.messages);
    if (isSame) return "same";
    becomeCopy(conversation);
  }
  return save(conversation, false, Math.min(conversation.updatedMs, Date.now()));
}
