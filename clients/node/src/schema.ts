/**
 * What engines send, by PROTOCOL.md: a schema made of examples, which gives each message its type and checks it.
 *
 * A value must be like its example. A number with a fraction allows any number, -1 and 0 allow all integers from there
 * on, other integers those from 0 to the example; an array of one example has any length; an empty column is a `bin`.
 */
export const PROTOCOL_VERSION = [1, 3];
export const Op = {
  HELLO: 0x01, WELCOME: 0x02, REFUSED: 0x03, SUBMIT: 0x10, ACCEPTED: 0x11, OUTPUT: 0x12, ERROR: 0x13,
  ABORT: 0x14, PING: 0x20, PONG: 0x21, CONTROL: 0x30, REPLY: 0x31, BYE: 0x41,
} as const;

export const isMap = (value: unknown): value is object => Object.getPrototypeOf(value ?? 0) === Object.prototype;
export const snake = (name: string) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);

/** A field that may be left out; so may nil stand for it, if it has no default. */
class Absent {
  constructor(readonly like: unknown, readonly byDefault?: unknown) {}
}
const or = <T>(byDefault: T, like: T = byDefault) => new Absent(like, byDefault) as T;
const optional = <T>(like: T) => new Absent(like) as T | undefined;
const oneOf = <T extends string>(...names: T[]) => new Set(names) as unknown as T;

const MAX_UINT32 = 2 ** 32 - 1;
const sampling = {
  temperature: or(1, 0.5), topP: or(1, 0.5), topK: or(0, -1), minP: or(0, 0.5), seed: optional(0),
  maxTokens: optional(0), stopTokenIds: or([], [0]), ignoreEos: or(false), skipReadingPrefixCache: or(false),
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
  prefixCacheQueries: 0, prefixCacheHits: 0, prefixCacheHitRate: or(0, 0.5), numPreemptions: 0, numAborts: 0,
  promptTokens: 0, generationTokens: 0, numSteps: 0, paused: false, numClients: or(0), numProtocolErrors: or(0),
};
const [bin, uint32, int32] = [new Uint8Array(), new Uint32Array(), new Int32Array()];
export const FROM_ENGINE = {
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
export type Schema = typeof FROM_ENGINE;
/** A message of an engine; `op` tells which. */
export type EngineMessage = { [O in keyof Schema]: { op: O } & Schema[O] }[keyof Schema];
export type Welcome = Schema[typeof Op.WELCOME];
export type Reply = Schema[typeof Op.REPLY];
export type Stats = typeof stats;
export type SamplingParams = Partial<typeof sampling>;
/** News of a request: new tokens; with the first, how many of the prompt were cached; with the last, how it ended. */
export type Output = { tokenIds: number[] } & Partial<Omit<typeof event, "handle">>;

/** What is in the value of the example, with names in camelCase. Throws Error if the value is not like the example. */
export function check<T>(value: any, example: T, path = "the body"): T {
  const like: any = example;
  if (like instanceof Absent) {
    const absent = value === undefined || (value === null && like.byDefault === undefined);
    return (absent ? like.byDefault : check(value, like.like, path)) as T;
  }
  const isLike =
    like instanceof Set ? like.has(value)
    : like?.BYTES_PER_ELEMENT ? value instanceof Uint8Array && value.length % like.BYTES_PER_ELEMENT === 0
    : Array.isArray(like) ? Array.isArray(value) && (like.length === 1 || like.length === value.length)
    : isMap(like) ? isMap(value)
    : Number.isInteger(like) ? Number.isSafeInteger(value) && value >= Math.min(like, 0) && !(like > 0 && value > like)
    : typeof value === typeof like;
  if (!isLike) throw new Error(`${path} is ${value === undefined ? "missing" : "of a wrong type or out of range"}`);
  if (Array.isArray(like)) return value.map((item: unknown, i: number) => check(item, like[0], `${path}[${i}]`));
  if (like.BYTES_PER_ELEMENT === 4) return new like.constructor(unpackInt32(value));
  if (!isMap(like)) return value;
  const fields = Object.entries(like).map(([name, of]) => [name, check(value[snake(name)], of, `${path}.${name}`)]);
  return Object.fromEntries(fields.filter(([, field]) => field !== undefined));
}

/** The integers of an int32 little-endian column, on any host and at any alignment. */
export function unpackInt32(bytes: Uint8Array): Int32Array {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  return Int32Array.from({ length: bytes.length / 4 }, (_, i) => view.getInt32(4 * i, true));
}
