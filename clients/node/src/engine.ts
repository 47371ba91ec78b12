/**
 * A session with one engine over one socket, and the streams of its requests. One loop receives, answers PING and hands
 * out what arrives. BYE, a malformed message, an error that names no request and 10 s of silence fail what is open.
 */
import { createHash, randomUUID } from "node:crypto";
import { EventEmitter, on, once } from "node:events";
import { setTimeout } from "node:timers/promises";
import { Dealer } from "zeromq";
import {
  EngineError,
  Op,
  PROTOCOL_VERSION,
  decode,
  encode,
  packInt32,
  tooNew,
  unpackOutput,
} from "./wire.js";
import type { Output, Reply, SamplingParams, Stats, Welcome } from "./wire.js";

export * from "./wire.js";
/** Z85 text of 40 characters each, by zeromq's names: the engine's public key, and the client's own two. */
export type CurveKeys = { curveServerKey: string; curvePublicKey: string; curveSecretKey: string };
export type GenerateOptions = {
  request_id?: string;
  priority?: number;
  cache_salt?: string;
  timeout_s?: number;
  signal?: AbortSignal;
};
/** Of a request: what it takes to go on with it in another session. numLost: sessions in a row without a token. */
type Sample = { requestId: string; index: number; seed?: number; token_ids: number[]; numLost: number };

const newEmitter = () => new EventEmitter().setMaxListeners(0).on("error", () => {}); // an error may have no listener
const MAX_LOST = 3; // what was open at so many ends may be their cause
const PAUSE_MS = 100;
const isLost = (error: unknown) =>
  error instanceof EngineError && ["engine_dead", "no_session", "draining"].includes(error.code);

export class Engine {
  /** What the engine said of itself: model card, limits, capabilities. */
  welcome!: Welcome;
  #socket!: Dealer;
  #error: EngineError | undefined;
  #isClosed = false;
  #reopening: Promise<void> | undefined;
  #sending = Promise.resolve();
  #numCalls = 0;
  #numSessions = 0;
  #answers = newEmitter(); // emits "welcome" and, by call ids, replies
  #unanswered = new Map<string, Sample[]>(); // of requests that have not been accepted
  #streams = new Map<string, EventEmitter>(); // of requests that have not ended, by request id; they emit "output"
  #samples = new Map<number, Sample>(); // that have not ended, by handle

  private constructor(
    private readonly endpoint: string,
    private readonly socketOptions: object,
    private readonly resumeMs: number,
  ) {}

  /**
   * Open a session. It fails when the engine refuses, or is silent for timeoutMs, now or later. With resumeMs, requests
   * outlive their engine: they go on with the next one that serves the endpoint within so long.
   */
  static async connect(
    endpoint: string,
    { keys, timeoutMs = 10_000, resumeMs = 0 }: { keys?: CurveKeys; timeoutMs?: number; resumeMs?: number } = {},
  ) {
    if (endpoint.startsWith("tcp:") && !keys)
      throw new EngineError("invalid_request", `${endpoint} needs CURVE keys`);
    const options = { ...keys, sendTimeout: timeoutMs, receiveTimeout: timeoutMs };
    const engine = new Engine(endpoint, options, resumeMs);
    await engine.#open();
    return engine;
  }

  async #open() {
    const socket = new Dealer({
      sendHighWaterMark: 1000,
      receiveHighWaterMark: 1000,
      maxMessageSize: 16 * 2 ** 20,
      linger: 200,
      ...this.socketOptions,
    });
    this.#socket = socket;
    this.#error = undefined;
    this.#sending = Promise.resolve();
    this.#samples.clear();
    this.#unanswered.clear();
    const gone = new EngineError("engine_dead", "the connection to the engine was closed");
    // What it has sent is read first.
    socket.events.on("disconnect", () => setTimeout(PAUSE_MS).then(() => this.#fail(gone, socket)));
    socket.connect(this.endpoint);
    this.#receive(socket).catch((error) => this.#fail(error, socket));
    this.#send(Op.HELLO, { protocol: PROTOCOL_VERSION, client: "nanocore-client (node)" });
    [this.welcome] = await once(this.#answers, "welcome");
    this.#numSessions++;
  }

  /** Wait for the session's end, and open another one; all who wait get the same one. */
  async #reopen() {
    if (!this.#error) await once(this.#answers, "end").catch(() => {}); // its error is its end
    for (const end = Date.now() + this.resumeMs; ; await setTimeout(PAUSE_MS))
      try {
        if (this.#isClosed) throw this.#error;
        return await this.#open();
      } catch (error) {
        if (this.#isClosed || Date.now() > end) throw error;
      }
  }

  /**
   * Submit a request and stream its output. Leaving the loop aborts it; so does the signal, with an AbortError. With
   * `n` above 1 each output is of the sample `index`, and the last one is the end of the last sample.
   */
  async *generate(
    promptTokenIds: ArrayLike<number>,
    sampling?: SamplingParams,
    options: GenerateOptions = {},
  ) {
    const { request_id = randomUUID(), signal, ...fields } = options;
    if (this.#streams.has(request_id))
      throw new EngineError("duplicate_request_id", `${request_id} is in use`);
    const why = tooNew(this.welcome, sampling, fields);
    if (why) throw new EngineError("invalid_request", why);
    const prompt_token_ids = packInt32(promptTokenIds);
    const start = Date.now();
    const defaults = this.welcome.model.default_sampling;
    const open = Array.from(
      { length: sampling?.n ?? 1 },
      (_, index): Sample => ({ requestId: request_id, index, token_ids: [], numLost: 0 }),
    );
    let groups = [open.slice()];
    const body: Record<string, unknown> = { prompt_token_ids, sampling, ...fields };
    for (;;) {
      const session = this.#numSessions;
      const stream = newEmitter();
      const outputs = on(stream, "output", { signal });
      try {
        for (const group of groups) {
          this.#send(Op.SUBMIT, { ...body, ...this.#resumed(group, sampling ?? defaults) });
          this.#streams.set(group[0]!.requestId, stream);
          this.#unanswered.set(group[0]!.requestId, group);
        }
        for await (const [sample, output] of outputs as AsyncIterable<[Sample, Output]>) {
          for (const id of output.token_ids) sample.token_ids.push(id);
          if (output.token_ids.length) sample.numLost = 0;
          const { finish_reason, message } = output;
          if (this.resumeMs && finish_reason === "abort" && message)
            throw new EngineError("engine_dead", message); // it stops
          if (finish_reason) open.splice(open.indexOf(sample), 1);
          yield { ...output, index: sample.index };
          if (!open.length) return;
        }
      } catch (error) {
        if (!this.resumeMs || !isLost(error) || this.#isClosed) throw error;
        const isAccepted = open[0]!.seed !== undefined;
        if (isAccepted && open.some((sample) => ++sample.numLost === MAX_LOST)) throw error;
        signal?.throwIfAborted();
        if (this.#reopening || session === this.#numSessions)
          await (this.#reopening ??= this.#reopen().finally(() => (this.#reopening = undefined)));
        if (isAccepted) {
          for (const sample of open) sample.requestId = `${request_id}.${sample.index}`;
          groups = open.map((sample) => [sample]);
        }
        if (fields.timeout_s) body.timeout_s = Math.max(fields.timeout_s - (Date.now() - start) / 1000, 1e-3);
      } finally {
        const request_ids = groups.map(([sample]) => sample!.requestId);
        const left = request_ids.filter((id) => this.#streams.get(id) === stream);
        if (left.length && !this.#error) this.#send(Op.ABORT, { request_ids: left });
      }
    }
  }

  /** The fields of a SUBMIT in which samples differ, and a sample that goes on from its request. */
  #resumed(group: Sample[], sampling?: SamplingParams) {
    const { requestId: request_id, index, seed, token_ids } = group[0]!;
    if (seed === undefined) return { request_id };
    const isStarted = index || token_ids.length; // the prompt's log probabilities come before, of the first one
    const output_token_ids = token_ids.length ? packInt32(token_ids) : undefined;
    const why = tooNew(this.welcome, {}, { output_token_ids });
    if (why) throw new EngineError("invalid_request", why);
    const changes = { seed, n: undefined, ...(isStarted ? { prompt_logprobs: undefined } : {}) };
    return { request_id, output_token_ids, sampling: { ...sampling, ...changes } };
  }

  /** End one sample of a request; the others go on, and its last output says "abort". */
  abort(requestId: string, index: number): void {
    for (const [handle, sample] of this.#samples)
      if (sample.index === index && [requestId, `${requestId}.${index}`].includes(sample.requestId))
        this.#send(Op.ABORT, { request_ids: [], handles: packInt32([handle | 0]) });
  }

  /** Run a CONTROL operation; the reply's `ok` says whether it was done. */
  async control(operation: string, args: { file?: string; offset?: number } = {}): Promise<Reply> {
    const call_id = ++this.#numCalls;
    this.#send(Op.CONTROL, { call_id, operation, ...args });
    const [reply] = await once(this.#answers, `${call_id}`);
    return reply;
  }

  /** The engine's counters and gauges. */
  async stats(): Promise<Stats> {
    const { stats, message } = await this.control("stats");
    if (stats) return stats;
    throw new EngineError("protocol_error", `the engine gave no stats: ${message}`);
  }

  /** One of the model card's files, its digest verified. */
  async readFile(name: string): Promise<Uint8Array> {
    const file = this.welcome.model.files?.find(
      (file) => file.name === name && file.num_bytes <= 2 ** 26,
    );
    if (!file)
      throw new EngineError("invalid_request", `the model has no file ${name} of at most 64 MiB`);
    const content = Buffer.alloc(file.num_bytes);
    for (let offset = 0; offset < content.length;) {
      const { data, message } = await this.control("read_file", { file: name, offset });
      if (!data?.length)
        throw new EngineError("protocol_error", `file ${name} ends at ${offset}: ${message}`);
      content.set(data.subarray(0, content.length - offset), offset);
      offset += data.length;
    }
    if (createHash("sha256").update(content).digest("hex") === file.sha256) return content;
    throw new EngineError(
      "protocol_error",
      `file ${name} does not have the digest that the model card gives`,
    );
  }

  /** Say BYE and close; open requests fail. Idempotent. */
  async close(): Promise<void> {
    this.#isClosed = true;
    if (!this.#error) this.#send(Op.BYE, { reason: "the client is done" });
    const closed = new EngineError("no_session", "this client is closed");
    this.#fail(closed, this.#socket, this.#sending);
    await this.#sending;
  }

  /** Queue one message: the socket takes one at a time. */
  #send(op: Op, body: object): void {
    if (this.#error) throw this.#error;
    const frames = encode(op, body);
    const socket = this.#socket;
    this.#sending = this.#sending
      .then(() => socket.send(frames))
      .catch((error) => this.#fail(error, socket));
  }

  async #receive(socket: Dealer): Promise<void> {
    for await (const frames of socket) {
      const message = decode(frames);
      if (message.op === Op.OUTPUT) {
        for (const [handle, output] of unpackOutput(message)) {
          const sample = this.#samples.get(handle);
          if (!sample) continue;
          this.#streams.get(sample.requestId)?.emit("output", sample, output);
          if (!output.finish_reason || !this.#samples.delete(handle)) continue;
          if (![...this.#samples.values()].some(({ requestId }) => requestId === sample.requestId))
            this.#streams.delete(sample.requestId);
        }
      } else if (message.op === Op.PING) this.#send(Op.PONG, { nonce: message.nonce });
      else if (message.op === Op.ACCEPTED) {
        const { handle, request_id, seed } = message;
        (this.#unanswered.get(request_id) ?? []).forEach((sample, i) => {
          const ahead = seed - 2 ** 53 + i; // exact, as the sum may not be
          sample.seed ??= ahead < 0 ? ahead + 2 ** 53 : ahead;
          this.#samples.set(handle + i, sample);
        });
        this.#unanswered.delete(request_id);
      } else if (message.op === Op.REPLY) this.#answers.emit(`${message.call_id}`, message);
      else if (message.op === Op.WELCOME) this.#answers.emit("welcome", message);
      else if (message.op === Op.BYE)
        throw new EngineError("engine_dead", `engine stopped: ${message.reason ?? ""}`);
      else if (message.op === Op.ERROR || message.op === Op.REFUSED) {
        const { code = message.retry_after_s == null ? "protocol_error" : "overloaded" } = message; // REFUSED has none
        const error = new EngineError(code, message.message, message.retry_after_s ?? undefined);
        if (!message.request_id || error.code === "engine_dead" || error.code === "no_session")
          throw error;
        const stream = this.#streams.get(message.request_id);
        this.#streams.delete(message.request_id);
        stream?.emit("error", error);
      }
    }
  }

  /** End the session, after lastWords: everyone who waits gets the error. The first one counts. */
  #fail(cause: Error & { code?: string }, socket: Dealer, lastWords = Promise.resolve()): void {
    if (this.#error || socket !== this.#socket) return;
    const silence = `the engine was silent for ${socket.receiveTimeout / 1000} s`;
    if (cause instanceof EngineError) this.#error = cause;
    else if (cause.code === "EAGAIN") this.#error = new EngineError("engine_dead", silence);
    else this.#error = new EngineError("protocol_error", `the socket failed: ${cause.message}`);
    void lastWords.then(() => socket.close());
    const emitters = [this.#answers, ...this.#streams.values()];
    this.#streams.clear();
    for (const emitter of emitters) emitter.emit("error", this.#error);
  }
}
