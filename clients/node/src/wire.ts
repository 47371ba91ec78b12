/**
 * The wire format of PROTOCOL.md: messages to frames and back, token ids to columns and back.
 *
 * A decoded message has its names in camelCase, its defaults filled in and no unknown fields. Whatever is no message
 * raises EngineError "protocol_error".
 */
import { decode as unpackBody, encode as packBody } from "@msgpack/msgpack";
import { FROM_ENGINE, check, isMap, snake } from "./schema.js";
import type { EngineMessage, Op, Output, Schema } from "./schema.js";

/** Those of PROTOCOL.md, section 8; later versions may add some. */
export type ErrorCode = "invalid_request" | "context_length_exceeded" | "duplicate_request_id" | "overloaded"
  | "engine_dead" | "protocol_error" | "unknown_op" | "no_session" | (string & {});

/** Every error that this package raises on purpose. retryAfterS: with "overloaded", when to try again, in seconds. */
export class EngineError extends Error {
  override readonly name = "EngineError";
  constructor(readonly code: ErrorCode, message: string, readonly retryAfterS?: number) {
    super(message);
  }
}

/** Throws Error at text that is no UTF-8, as which the msgpack library takes any bytes, and at nesting without end. */
function checkText(value: unknown, raw: any): void {
  if (typeof value === "string") utf8.decode(raw);
  else if (value instanceof Object && !(value instanceof Uint8Array))
    for (const [key, item] of Object.entries(value)) checkText(item, raw[key]);
}
const utf8 = new TextDecoder("utf-8", { fatal: true });

/** Integers as an int32 little-endian column, on any host. */
export function packInt32(values: ArrayLike<number>): Uint8Array {
  const column = Buffer.alloc(4 * values.length);
  Array.from(values).forEach((value, i) => {
    if (value !== (value | 0)) throw new EngineError("invalid_request", `token id ${value} is no int32`);
    column.writeInt32LE(value, 4 * i);
  });
  return column;
}

/** A value with the wire's names, in all its depth. */
export function toWire(value: unknown): any {
  if (typeof value === "string" && !value.isWellFormed())
    throw new EngineError("invalid_request", "a string with a lone surrogate is no text");
  if (!isMap(value)) return value;
  return Object.fromEntries(Object.entries(value).map(([name, field]) => [snake(name), toWire(field)]));
}

/** The two frames of a message; names are the wire's, undefined fields are left out. */
export function encode(op: number, body: object): [Uint8Array, Uint8Array] {
  return [Uint8Array.of(op), packBody(body, { ignoreUndefined: true })];
}

/** The op and the raw body of a message of either side. Throws Error at what has not the form of one. */
export function unpack(frames: Uint8Array[]): { op: number; body: unknown } {
  const [op, bytes] = frames as [Uint8Array, Uint8Array];
  if (frames.length !== 2 || op.length !== 1) throw new Error("a message is an op byte and a body, in two frames");
  const body = unpackBody(bytes);
  checkText(body, unpackBody(bytes, { rawStrings: true })); // the same, with text as bytes
  return { op: op[0]!, body };
}

/** Decode and check one message of an engine. */
export function decode(frames: Uint8Array[]): EngineMessage {
  try {
    const { op, body } = unpack(frames);
    if (!(op in FROM_ENGINE)) throw new Error(`engines send no op ${op}`);
    return { op, ...check(body, FROM_ENGINE[op as keyof Schema], `op ${op}`) } as EngineMessage;
  } catch (error) {
    throw new EngineError("protocol_error", `malformed message: ${(error as Error).message}`);
  }
}

/** An OUTPUT's news by handle. */
export function unpackOutput({ handles, tokens, counts, events }: Schema[typeof Op.OUTPUT]): Map<number, Output> {
  const outputs = new Map<number, Output>();
  let end = 0;
  handles.forEach((handle, i) => {
    outputs.set(handle, { tokenIds: [...tokens.subarray(end, (end += counts ? counts[i] ?? NaN : 1))] });
  });
  if (end !== tokens.length || (counts ?? handles).length !== handles.length)
    throw new EngineError("protocol_error", "the columns of an OUTPUT do not fit together");
  for (const { handle, ...event } of events) outputs.set(handle, { tokenIds: [], ...outputs.get(handle), ...event });
  return outputs;
}
