// What a kept conversation looks like. Storage is every program's of this address, older and newer
// pages included, so what is read from it is taken only if all of it is as `Answer.toMessage` and
// chat.js write it.

const isText = (value) => typeof value === "string";
const isObject = (value) => typeof value === "object" && value !== null;
const isTextOrNone = (value) => value === null || isText(value);
export const MAX_TITLE_CHARS = 200;
const FIGURES = ["ttftMs", "tokensPerS", "promptTokens", "cachedTokens", "outputTokens"];

/** Whether a value that was read is a conversation with this id. */
export function isConversation(value, id) {
  return isShaped(value, id) && !hasLongTitle(value);
}

export const hasLongTitle = ({ title }) => (title ?? "").length > MAX_TITLE_CHARS;

/** Whether it is one, but for the length of its title. */
export function isShaped(value, id) {
  if (!isObject(value) || value.id !== id || !Number.isFinite(value.updatedMs)) return false;
  if (value.title !== undefined && !isText(value.title)) return false;
  return Array.isArray(value.messages) && value.messages.every(isMessage);
}

function isMessage(message) {
  if (!isObject(message) || !isText(message.content)) return false;
  if (message.role === "user") return true;
  if (message.role === "tool") return isText(message.toolCallId);
  return message.role === "assistant" && isAnswer(message);
}

function isAnswer({ reasoning, toolCalls, finishReason, ending, figures }) {
  if (!isText(reasoning) || !isTextOrNone(finishReason)) return false;
  if (!Array.isArray(toolCalls) || !toolCalls.every(isCall)) return false;
  if (ending !== null && !(isObject(ending) && isText(ending.kind) && isText(ending.text))) return false;
  return isObject(figures) && FIGURES.every((name) => figures[name] === null || Number.isFinite(figures[name]));
}

function isCall(call) {
  if (!isObject(call) || !isText(call.id) || !isObject(call.function)) return false;
  return isText(call.function.name) && isText(call.function.arguments);
}
