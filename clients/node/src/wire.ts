/**
 * PROTOCOL.md's messages, by its own names, to frames and back, and its columns of integers. Of what engines send, the
 * fields that this client acts on are checked. Fields with a question mark may be missing, and then have their default.
 */
import { decode as unpackBody, encode as packBody } from "@msgpack/msgpack";

export const PROTOCOL_VERSION = [1, 14];
export enum Op {
  HELLO = 0x01,
  WELCOME = 0x02,
  REFUSED = 0x03,
  SUBMIT = 0x10,
  ACCEPTED = 0x11,
  OUTPUT = 0x12,
  ERROR = 0x13,
  ABORT = 0x14,
  PING = 0x20,
  PONG = 0x21,
  CONTROL = 0x30,
  REPLY = 0x31,
  DRAINING = 0x40,
  BYE = 0x41,
}

/** What the output must be: exactly one of the first six. A schema is JSON text. */
export interface StructuredOutputs {
  json?: string;
  regex?: string;
  choice?: string[];
  grammar?: string;
  json_object?: boolean;
  structural_tag?: { structures: { begin: string; schema: string; end: string }[]; triggers: string[] };
  disable_any_whitespace?: boolean;
  reasoning?: { begin?: string; end: string } | null;
  free_prefixes?: string[];
}
export interface SamplingParams {
  temperature?: number;
  top_p?: number;
  top_k?: number;
  min_p?: number;
  seed?: number | null;
  max_tokens?: number | null;
  stop_token_ids?: number[];
  ignore_eos?: boolean;
  skip_reading_prefix_cache?: boolean;
  n?: number;
  min_tokens?: number;
  presence_penalty?: number;
  frequency_penalty?: number;
  repetition_penalty?: number;
  allowed_token_ids?: number[] | null;
  logprobs?: number | null;
  prompt_logprobs?: number | null;
  logit_bias?: [token_id: number, bias: number][];
  bad_words_token_ids?: number[][];
  structured_outputs?: StructuredOutputs | null;
  pooling?: "last" | "mean" | null;
  repetition_detection?: { max_pattern_size: number; min_pattern_size?: number; min_count: number } | null;
}
/** The minor versions that brought fields of a request. */
const SINCE: Record<string, number> = { structured_outputs: 6, pooling: 7, reasoning: 7, free_prefixes: 8 };
SINCE.repetition_detection = 14;
for (const name of ["output_token_ids", "timeout_s"]) SINCE[name] = 9;
for (const name of (
  "n min_tokens presence_penalty frequency_penalty repetition_penalty allowed_token_ids logprobs prompt_logprobs " +
  "logit_bias bad_words_token_ids"
).split(" "))
  SINCE[name] = 5;
/** Which field of a request an engine does not know, and which it needs; undefined if there is none. */
export function tooNew({ protocol: [, minor] }: Welcome, sampling: SamplingParams = {}, fields: object = {}) {
  const found = Object.entries({ ...sampling, ...sampling.structured_outputs, ...fields }).find(
    ([name, value]) => value !== undefined && minor < (SINCE[name] ?? 0),
  );
  return found && `${found[0]} needs an engine of protocol 1.${SINCE[found[0]]}`;
}
export interface ModelCard {
  model: string;
  architecture: string;
  dtype: string;
  vocab_size: number;
  max_model_len: number;
  eos_token_ids: number[];
  block_size: number;
  num_blocks: number;
  default_sampling?: SamplingParams;
  files?: { name: string; num_bytes: number; sha256: string }[];
  hidden_size?: number | null;
  /** Engines with the same one give a request the same tokens. */
  numerics_fingerprint?: string | null;
}
export interface Welcome {
  protocol: [number, number];
  session: string;
  engine_instance: string;
  model: ModelCard;
  limits: Record<string, number | null>;
  capabilities?: string[];
  role?: "user" | "admin";
}
export type Stats = Record<string, number | boolean>;
export type Reply = {
  ok?: boolean;
  message?: string | null;
  stats?: Stats | null;
  data?: Uint8Array | null;
};
/** Of one token: its rank, 1 being the most likely, and candidates: itself, then the most likely ones. */
export interface TokenLogprobs {
  rank: number;
  candidates: { token_id: number; logprob: number }[];
}
/** News of a request: new tokens; with the first, how many of the prompt were cached; with the last, how it ended. */
export interface Output {
  token_ids: number[];
  logprobs?: TokenLogprobs[];
  prompt_logprobs?: TokenLogprobs[];
  num_cached_tokens?: number | null;
  stop_reason?: number | null;
  /** With `repetition_detection`, if the output repeats itself. */
  stop_cause?: "repetition" | null;
  message?: string | null;
  finish_reason?: "stop" | "length" | "abort" | "error" | "timeout" | null;
  /** With `pooling`: the prompt's. */
  embedding?: number[];
}
/** A message of an engine: its op, and the fields of its body. */
export type EngineMessage = { op: Op; [field: string]: any };

/** What this package throws. code: section 12 of PROTOCOL.md. retryAfterS: if "overloaded" or "draining", when to try again. */
export class EngineError extends Error {
  override readonly name = "EngineError";
  constructor(
    readonly code: string,
    message: string,
    readonly retryAfterS?: number,
  ) {
    super(message);
  }
}

const EMPTY = new Uint8Array();
const isMap = (value: unknown) => Object.getPrototypeOf(value ?? 0) === Object.prototype;
const isText = (value: unknown) => typeof value === "string";
const isCount = (value: any) => Number.isSafeInteger(value) && value >= 0;
const isOurs = (version: any) =>
  version?.length === 2 && version[0] === PROTOCOL_VERSION[0] && isCount(version[1]);
const isColumn = (value: any) => value instanceof Uint8Array && value.length % 4 === 0;
const isEvent = (value: any) =>
  isMap(value) && isCount(value.handle) && isText(value.finish_reason ?? "");
/** What must hold for the bodies that engines send; they send no other ops. */
const CHECKS: Partial<Record<Op, (body: any) => boolean>> = {
  [Op.WELCOME]: ({ protocol, model, limits }) => isOurs(protocol) && isMap(model) && isMap(limits),
  [Op.REFUSED]: () => true,
  [Op.ACCEPTED]: ({ request_id, handle }) => isText(request_id) && isCount(handle),
  [Op.OUTPUT]: ({ handles = EMPTY, tokens = EMPTY, counts, events = [] }) =>
    [handles, tokens, counts ?? EMPTY].every(isColumn) &&
    Array.isArray(events) &&
    events.every(isEvent),
  [Op.ERROR]: ({ code, message, request_id }) => [code, message, request_id ?? ""].every(isText),
  [Op.PING]: ({ nonce = 0 }) => isCount(nonce),
  [Op.PONG]: () => true,
  [Op.REPLY]: ({ call_id, data }) => isCount(call_id) && (data ?? EMPTY) instanceof Uint8Array,
  [Op.DRAINING]: () => true,
  [Op.BYE]: () => true,
};

/** The two frames of a message; undefined fields are left out. */
export function encode(op: Op, body: object): [Uint8Array, Uint8Array] {
  return [Uint8Array.of(op), packBody(body, { ignoreUndefined: true })];
}

/** Decode and check one message of an engine. Throws EngineError "protocol_error". */
export function decode([op, bytes, ...more]: Uint8Array[]): EngineMessage {
  try {
    if (op?.length !== 1 || !bytes || more.length) throw new Error("not one byte and a body");
    const body: any = unpackBody(bytes);
    const code = op[0] as Op;
    if (!isMap(body) || !CHECKS[code]?.(body))
      throw new Error(`no ${Op[code] ?? "op"} of protocol 1`);
    return { ...body, op: code };
  } catch (error) {
    throw new EngineError("protocol_error", `malformed message: ${(error as Error).message}`);
  }
}

/** Integers as an int32 little-endian column, on any host. */
export function packInt32(values: ArrayLike<number>): Uint8Array {
  const column = Buffer.alloc(4 * values.length);
  Array.from(values).forEach((value, i) => {
    if (value !== (value | 0))
      throw new EngineError("invalid_request", `token id ${value} is no int32`);
    column.writeInt32LE(value, 4 * i);
  });
  return column;
}

function unpackColumn(column: Uint8Array, get: "getInt32" | "getUint32" | "getFloat32"): number[] {
  const view = new DataView(column.buffer, column.byteOffset, column.length);
  return Array.from({ length: column.length / 4 }, (_, i) => view[get](4 * i, true));
}

/** Columns of log probabilities, as [handle, entry] of each token. */
function unpackLogprobs(columns: any): [number, TokenLogprobs][] {
  const names = ["handles", "ranks", "counts", "token_ids", "logprobs"];
  const bins = names.map((name) => columns?.[name] ?? EMPTY);
  const sizes = bins.map((bin) => bin.length);
  let end = 0;
  if (isMap(columns ?? {}) && bins.every(isColumn)) {
    const [ranks, counts] = [bins[1], bins[2]].map((bin) => unpackColumn(bin, "getUint32"));
    const logprobs = unpackColumn(bins[4], "getFloat32");
    const candidates = unpackColumn(bins[3], "getInt32").map((token_id, i) => ({
      token_id,
      logprob: logprobs[i]!,
    }));
    const entries = unpackColumn(bins[0], "getUint32").map((handle, i): [number, TokenLogprobs] => [
      handle,
      { rank: ranks![i]!, candidates: candidates.slice(end, (end += counts![i] || NaN)) },
    ]);
    if (end === candidates.length && sizes[4] === 4 * end && sizes[1] === sizes[0] && sizes[2] === sizes[0])
      return entries;
  }
  throw new EngineError("protocol_error", "the log probabilities of an OUTPUT do not fit together");
}

/** An OUTPUT's news by handle. Throws EngineError "protocol_error" if its columns do not fit together. */
export function unpackOutput({
  handles = EMPTY,
  tokens = EMPTY,
  counts,
  events = [],
  ...more
}: EngineMessage) {
  const outputs = new Map<number, Output>();
  const tokenIds = unpackColumn(tokens, "getInt32");
  const numTokens = counts && unpackColumn(counts, "getUint32");
  let end = 0;
  unpackColumn(handles, "getUint32").forEach((handle, i) => {
    outputs.set(handle, {
      token_ids: tokenIds.slice(end, (end += numTokens ? (numTokens[i] ?? NaN) : 1)),
    });
  });
  if (end !== tokenIds.length || (counts ?? handles).length !== handles.length)
    throw new EngineError("protocol_error", "the columns of an OUTPUT do not fit together");
  for (const name of ["logprobs", "prompt_logprobs"] as const)
    for (const [handle, entry] of unpackLogprobs(more[name])) {
      const output = outputs.get(handle) ?? { token_ids: [] };
      outputs.set(handle, { ...output, [name]: [...(output[name] ?? []), entry] });
    }
  for (const { handle, embedding, ...event } of events) {
    if (isColumn(embedding)) event.embedding = unpackColumn(embedding, "getFloat32");
    outputs.set(handle, { token_ids: [], ...outputs.get(handle), ...event });
  }
  return outputs;
}
