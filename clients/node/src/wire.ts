/**
 * The wire format of PROTOCOL.md: messages to frames and back, token ids to columns and back.
 *
 * A schema of examples checks what engines send, and gives each message its type: names in camelCase, defaults filled
 * in, unknown fields dropped. Whatever is no message raises EngineError "protocol_error".
 */
import { decode as unpackBody, encode as packBody } from "@msgpack/msgpack";

export const PROTOCOL_VERSION = [1, 3];
export const Op = {
  HELLO: 0x01, WELCOME: 0x02, REFUSED: 0x03, SUBMIT: 0x10, ACCEPTED: 0x11, OUTPUT: 0x12, ERROR: 0x13,
  ABORT: 0x14, PING: 0x20, PONG: 0x21, CONTROL: 0x30, REPLY: 0x31, BYE: 0x41,
} as const;

/** Those of PROTOCOL.md, section 8; later versions may add some. */
export type ErrorCode =
  | "invalid_request" | "context_length_exceeded" | "duplicate_request_id" | "overloaded"
  | "engine_dead" | "protocol_error" | "unknown_op" | "no_session" | (string & {});

/** Every error that this package raises on purpose. retryAfterS: with "overloaded", when to try again, in seconds. */
export class EngineError extends Error {
  override readonly name = "EngineError";
  constructor(readonly code: ErrorCode, message: string, readonly retryAfterS?: number) {
    super(message);
  }
}

const snake = (name: string) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);

/** A field that may be left out; so may nil stand for it, if it has no default. */
class Absent {
  constructor(readonly like: unknown, readonly byDefault?: unknown) {}
}
const or = <T>(byDefault: T, like: T = byDefault) => new Absent(like, byDefault) as T;
const optional = <T>(like: T) => new Absent(like) as T | undefined;
const oneOf = <T extends string>(...names: T[]) => new Set(names) as unknown as T;

// The schema: a value must be like its example. A number with a fraction allows any number, -1 and 0 integers from there
// on, others those from 0 to the example; an array of one example has any length.
const MAX_UINT32 = 2 ** 32 - 1;
const sampling = {
  temperature: or(1, 0.5), topP: or(1, 0.5), topK: or(0, -1), minP: or(0, 0.5), seed: optional(0), maxTokens: optional(0),
  stopTokenIds: or([], [0]), ignoreEos: or(false), skipReadingPrefixCache: or(false),
};
const model = {
  model: "", architecture: "", dtype: "", vocabSize: 0, maxModelLen: 0, eosTokenIds: [0], blockSize: 0, numBlocks: 0,
  defaultSampling: or(check({}, sampling), sampling), files: or([], [{ name: "", numBytes: 0, sha256: "" }]),
};
const limits = {
  maxFrameBytes: 0, maxNumSeqs: 0, maxRequestIdChars: or(256, 0), maxCacheSaltChars: or(1024, 0), pingIntervalMs: 0,
  sessionTimeoutMs: 0, maxNumQueuedReqs: optional(0), maxNumQueuedTokens: optional(0), maxFileChunkBytes: or(65536, 0),
};
const event = {
  handle: MAX_UINT32, numCachedTokens: optional(0), finishReason: optional(oneOf("stop", "length", "abort", "error")),
  stopReason: optional(0), message: optional(""),
};
const stats = {
  numRequestsRunning: 0, numRequestsWaiting: 0, kvCacheUsagePerc: 0.5, numBlocks: 0, numFreeBlocks: 0,
  prefixCacheQueries: 0, prefixCacheHits: 0, prefixCacheHitRate: or(0, 0.5), numPreemptions: 0, numAborts: 0, numSteps: 0,
  promptTokens: 0, generationTokens: 0, paused: false, numClients: or(0), numProtocolErrors: or(0),
};
const [bin, uint32, int32] = [new Uint8Array(), new Uint32Array(), new Int32Array()];
const FROM_ENGINE = {
  [Op.WELCOME]: { protocol: [0, 0], session: "", engineInstance: "", model, limits, capabilities: or([], [""]) },
  [Op.REFUSED]: { message: "", supported: [[0, 0]] },
  [Op.ACCEPTED]: { requestId: "", handle: MAX_UINT32, seed: 0 },
  [Op.OUTPUT]: { handles: or(uint32), tokens: or(int32), counts: optional(uint32), events: or([], [event]) },
  [Op.ERROR]: { code: "", message: "", requestId: optional(""), retryAfterS: optional(0.5) },
  [Op.PING]: { nonce: or(0) },
  [Op.PONG]: { nonce: or(0), numSteps: optional(0) },
  [Op.REPLY]: { callId: 0, ok: or(true), message: optional(""), stats: optional(stats), data: optional(bin) },
  [Op.BYE]: { reason: or("") },
};
type Schema = typeof FROM_ENGINE;
/** A message of an engine; `op` tells which. */
export type EngineMessage = { [O in keyof Schema]: { op: O } & Schema[O] }[keyof Schema];
export type Welcome = Schema[typeof Op.WELCOME];
export type OutputMessage = Schema[typeof Op.OUTPUT];
export type Reply = Schema[typeof Op.REPLY];
export type Stats = typeof stats;
export type SamplingParams = Partial<typeof sampling>;
/** News of a request: new tokens; with the first, how many of the prompt were cached; with the last, how it ended. */
export type Output = { tokenIds: number[] } & Partial<Omit<typeof event, "handle">>;

/** The value, if it is like the example, with its names in camelCase; throws Error if not. */
function check<T>(value: any, example: T, path = "the body"): T {
  const like: any = example;
  if (like instanceof Absent) {
    const absent = value === undefined || (value === null && like.byDefault === undefined);
    return (absent ? like.byDefault : check(value, like.like, path)) as T;
  }
  const isLike =
    like instanceof Set ? like.has(value)
    : like?.BYTES_PER_ELEMENT ? value instanceof Uint8Array && value.length % like.BYTES_PER_ELEMENT === 0
    : Array.isArray(like) ? Array.isArray(value) && (like.length === 1 || like.length === value.length)
    : typeof like === "object" ? Object.getPrototypeOf(value ?? 0) === Object.prototype
    : Number.isInteger(like) ? Number.isSafeInteger(value) && value >= Math.min(like, 0) && !(like > 0 && value > like)
    : typeof value === typeof like;
  if (!isLike) throw new Error(`${path} is ${value === undefined ? "missing" : "of a wrong type or out of range"}`);
  if (Array.isArray(like)) return value.map((item: unknown, i: number) => check(item, like[0], `${path}[${i}]`));
  if (like.BYTES_PER_ELEMENT === 4) return new like.constructor(unpackInt32(value));
  if (Object.getPrototypeOf(like) !== Object.prototype) return value;
  const fields = Object.entries(like).map(([name, field]) => [name, check(value[snake(name)], field, `${path}.${name}`)]);
  return Object.fromEntries(fields.filter(([, field]) => field !== undefined));
}

/** Throws Error at nesting too deep to be meant, and at text that is no UTF-8: the msgpack library takes any bytes. */
function checkText(value: unknown, raw: any, depth = 0): void {
  if (depth > 32) throw new Error("nested too deeply");
  if (typeof value === "string") utf8.decode(raw);
  else if (value instanceof Object && !(value instanceof Uint8Array))
    for (const [key, item] of Object.entries(value)) checkText(item, raw[key], depth + 1);
}
const utf8 = new TextDecoder("utf-8", { fatal: true });

/** Integers as an int32 little-endian column, on any host. */
export function packInt32(values: ArrayLike<number>): Uint8Array {
  const view = new DataView(new ArrayBuffer(4 * values.length));
  Array.from(values).forEach((value, i) => {
    if (value !== (value | 0)) throw new EngineError("invalid_request", `token id ${value} is no int32`);
    view.setInt32(4 * i, value, true);
  });
  return new Uint8Array(view.buffer);
}

/** The integers of an int32 little-endian column, on any host and at any alignment. */
export function unpackInt32(bytes: Uint8Array): Int32Array {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  return Int32Array.from({ length: bytes.length / 4 }, (_, i) => view.getInt32(4 * i, true));
}

/** An object with its names in the wire's snake_case. */
export const toWire = (object: object) => Object.fromEntries(Object.entries(object).map(([k, v]) => [snake(k), v]));

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
    const message = { op, ...check(body, FROM_ENGINE[op as keyof Schema], `op ${op}`) } as EngineMessage;
    if (message.op === Op.OUTPUT) {
      const { handles, counts = handles.map(() => 1), tokens } = message;
      if (counts.length !== handles.length || counts.reduce((sum, n) => sum + n, 0) !== tokens.length)
        throw new Error("the columns of an OUTPUT do not fit together");
    }
    return message;
  } catch (error) {
    throw new EngineError("protocol_error", `malformed message: ${(error as Error).message}`);
  }
}
