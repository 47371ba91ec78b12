// An answer as it grows: what its chunks have brought so far, and how fast they came.
// What is kept of it is plain data (`toMessage`), which goes to storage and back to the server.

const MAX_TOOL_CALLS = 256;
const LEAST_DECODE_MS = 50;

export class Answer {
  constructor() {
    this.content = "";
    this.reasoning = "";
    this.toolCalls = [];
    this.finishReason = null;
    this.usage = null;
    this.ending = null; // of an answer without an end of its own: {kind, text}
    this.startedMs = null; // when it was asked for
    this.firstMs = null;
    this.lastMs = null;
  }

  /** Take a chunk that came at nowMs. True if there is more to show. */
  add(chunk, nowMs) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return false;
    const delta = choice.delta ?? {};
    const reasoning = text(delta.reasoning_content ?? delta.reasoning);
    const content = text(delta.content);
    const calls = Array.isArray(delta.tool_calls) ? delta.tool_calls : [];
    this.reasoning += reasoning;
    this.content += content;
    for (const call of calls) this.addCall(call);
    if (choice.finish_reason) this.finishReason = String(choice.finish_reason);
    const grows = Boolean(reasoning || content || calls.length);
    if (grows) this.firstMs ??= nowMs;
    if (grows || choice.finish_reason) this.lastMs = nowMs;
    return grows || Boolean(choice.finish_reason);
  }

  addCall(delta) {
    if (typeof delta !== "object" || delta === null) return;
    const index = delta.index ?? this.toolCalls.length;
    if (!Number.isInteger(index) || index < 0 || index >= MAX_TOOL_CALLS) return;
    while (this.toolCalls.length <= index) {
      this.toolCalls.push({ id: "", type: "function", function: { name: "", arguments: "" } });
    }
    const call = this.toolCalls[index];
    call.id = text(delta.id) || call.id;
    call.function.name += text(delta.function?.name);
    call.function.arguments += text(delta.function?.arguments);
  }

  /** The message that is kept. */
  toMessage() {
    return {
      role: "assistant",
      content: this.content,
      reasoning: this.reasoning,
      toolCalls: this.toolCalls,
      finishReason: this.finishReason,
      ending: this.ending,
      figures: this.figures(),
    };
  }

  /** What was measured here, and what the server counted. */
  figures() {
    const details = this.usage?.prompt_tokens_details;
    return {
      ttftMs: this.firstMs === null ? null : this.firstMs - this.startedMs,
      tokensPerS: this.tokensPerS(),
      promptTokens: number(this.usage?.prompt_tokens),
      cachedTokens: number(details?.cached_tokens),
      outputTokens: number(this.usage?.completion_tokens),
    };
  }

  /**
   * Of the tokens behind the first, in the time behind it. What comes within a few milliseconds
   * says nothing of that: then it is of all tokens since the request was sent.
   */
  tokensPerS() {
    const tokens = number(this.usage?.completion_tokens) ?? 0;
    if (this.firstMs === null || tokens < 1 || this.lastMs <= this.startedMs) return null;
    const decodeMs = this.lastMs - this.firstMs;
    if (decodeMs >= LEAST_DECODE_MS && tokens > 1) return ((tokens - 1) / decodeMs) * 1000;
    return (tokens / (this.lastMs - this.startedMs)) * 1000;
  }
}

// Another server may send something else in a field: then it has sent nothing that can be shown.
const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : null);

/** A kept message as the server takes it; null for an answer of which nothing came. */
export function toServer(message) {
  if (message.role !== "assistant") {
    const { role, content, toolCallId } = message;
    return toolCallId === undefined ? { role, content } : { role, content, tool_call_id: toolCallId };
  }
  if (!message.content && !message.toolCalls.length) return null;
  const turn = { role: "assistant", content: message.content };
  if (message.reasoning) turn.reasoning_content = message.reasoning;
  if (message.toolCalls.length) turn.tool_calls = message.toolCalls;
  return turn;
}
