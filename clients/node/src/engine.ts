/**
 * A session with one engine over one socket, and the streams of its requests. One loop receives, answers PING and hands
 * out what arrives. BYE, a malformed message, an error that names no request and 10 s of silence fail what is open.
 */
import { createHash, randomUUID } from "node:crypto";
import { EventEmitter, on, once } from "node:events";
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
  signal?: AbortSignal;
};

const newEmitter = () => new EventEmitter().setMaxListeners(0).on("error", () => {}); // an error may have no listener

export class Engine {
  /** What the engine said of itself: model card, limits, capabilities. */
  welcome!: Welcome;
  #error: EngineError | undefined;
  #sending = Promise.resolve();
  #numCalls = 0;
  #answers = newEmitter(); // emits "welcome" and, by call ids, replies
  #numSamples = new Map<string, number>(); // of requests that have not been accepted
  #streams = new Map<string, EventEmitter>(); // of requests that have not ended, by request id; they emit "output"
  #samples = new Map<number, { requestId: string; index: number }>(); // that have not ended, by handle

  private constructor(private readonly socket: Dealer) {}

  /** Open a session. It fails when the engine refuses, or is silent for timeoutMs, now or later. */
  static async connect(
    endpoint: string,
    { keys, timeoutMs = 10_000 }: { keys?: CurveKeys; timeoutMs?: number } = {},
  ) {
    if (endpoint.startsWith("tcp:") && !keys)
      throw new EngineError("invalid_request", `${endpoint} needs CURVE keys`);
    const limits = {
      sendHighWaterMark: 1000,
      receiveHighWaterMark: 1000,
      maxMessageSize: 16 * 2 ** 20,
      linger: 200,
    };
    const engine = new Engine(
      new Dealer({ ...limits, ...keys, sendTimeout: timeoutMs, receiveTimeout: timeoutMs }),
    );
    engine.socket.connect(endpoint);
    engine.#receive().catch((error) => engine.#fail(error));
    engine.#send(Op.HELLO, { protocol: PROTOCOL_VERSION, client: "nanocore-client (node)" });
    [engine.welcome] = await once(engine.#answers, "welcome");
    return engine;
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
    const why = tooNew(this.welcome, sampling);
    if (why) throw new EngineError("invalid_request", why);
    const stream = newEmitter();
    let numOpen = sampling?.n ?? 1;
    const outputs = on(stream, "output", { signal });
    this.#send(Op.SUBMIT, {
      request_id,
      prompt_token_ids: packInt32(promptTokenIds),
      sampling,
      ...fields,
    });
    this.#streams.set(request_id, stream);
    this.#numSamples.set(request_id, numOpen);
    try {
      for await (const [output] of outputs as AsyncIterable<[Output & { index: number }]>) {
        yield output;
        if (output.finish_reason && !--numOpen) return;
      }
    } finally {
      if (this.#streams.get(request_id) === stream)
        this.#send(Op.ABORT, { request_ids: [request_id] });
    }
  }

  /** End one sample of a request; the others go on, and its last output says "abort". */
  abort(requestId: string, index: number): void {
    for (const [handle, sample] of this.#samples)
      if (sample.requestId === requestId && sample.index === index)
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
    if (!this.#error) this.#send(Op.BYE, { reason: "the client is done" });
    this.#fail(new EngineError("no_session", "this client is closed"), this.#sending);
    await this.#sending;
  }

  /** Queue one message: the socket takes one at a time. */
  #send(op: Op, body: object): void {
    if (this.#error) throw this.#error;
    const frames = encode(op, body);
    this.#sending = this.#sending
      .then(() => this.socket.send(frames))
      .catch((error) => this.#fail(error));
  }

  async #receive(): Promise<void> {
    for await (const frames of this.socket) {
      const message = decode(frames);
      if (message.op === Op.OUTPUT) {
        for (const [handle, output] of unpackOutput(message)) {
          const { requestId = "", index } = this.#samples.get(handle) ?? {};
          this.#streams.get(requestId)?.emit("output", { index, ...output });
          if (!output.finish_reason || !this.#samples.delete(handle)) continue;
          if (![...this.#samples.values()].some((sample) => sample.requestId === requestId))
            this.#streams.delete(requestId);
        }
      } else if (message.op === Op.PING) this.#send(Op.PONG, { nonce: message.nonce });
      else if (message.op === Op.ACCEPTED) {
        const { handle, request_id: requestId } = message;
        for (let index = 0; index < (this.#numSamples.get(requestId) ?? 1); index++)
          this.#samples.set(handle + index, { requestId, index });
        this.#numSamples.delete(requestId);
      } else if (message.op === Op.REPLY) this.#answers.emit(`${message.call_id}`, message);
      else if (message.op === Op.WELCOME) this.#answers.emit("welcome", message);
      else if (message.op === Op.BYE)
        throw new EngineError("engine_dead", `engine stopped: ${message.reason ?? ""}`);
      else if (message.op === Op.ERROR || message.op === Op.REFUSED) {
        const { code = message.retry_after_s == null ? "protocol_error" : "overloaded" } = message; // REFUSED has none
        const error = new EngineError(code, message.message, message.retry_after_s ?? undefined);
        if (!message.request_id || error.code === "engine_dead" || error.code === "no_session")
          throw error;
        this.#streams.get(message.request_id)?.emit("error", error);
        this.#streams.delete(message.request_id);
      }
    }
  }

  /** End the session, after lastWords: everyone who waits gets the error. The first one counts. */
  #fail(cause: Error & { code?: string }, lastWords = Promise.resolve()): void {
    if (this.#error) return;
    const silence = `the engine was silent for ${this.socket.receiveTimeout / 1000} s`;
    if (cause instanceof EngineError) this.#error = cause;
    else if (cause.code === "EAGAIN") this.#error = new EngineError("engine_dead", silence);
    else this.#error = new EngineError("protocol_error", `the socket failed: ${cause.message}`);
    void lastWords.then(() => this.socket.close());
    for (const emitter of [this.#answers, ...this.#streams.values()])
      emitter.emit("error", this.#error);
    this.#streams.clear();
  }
}
