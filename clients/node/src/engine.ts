/**
 * Engine: a session with one engine over one socket, and the streams of its requests.
 *
 * One loop receives, answers PING and hands out what arrives. Every wait ends: BYE, a malformed message, an error that
 * names no request or 10 s of silence fail whatever is open.
 */
import { createHash, randomUUID } from "node:crypto";
import { EventEmitter, on, once } from "node:events";
import { Dealer } from "zeromq";
import { Op, PROTOCOL_VERSION } from "./schema.js";
import type { EngineMessage, Output, Reply, SamplingParams, Stats, Welcome } from "./schema.js";
import { EngineError, decode, encode, packInt32, toWire, unpackOutput } from "./wire.js";

export { Op, type Output, type Reply, type SamplingParams, type Stats, type Welcome } from "./schema.js";
export * from "./wire.js";
export type ControlOperation = "stats" | "reset_prefix_cache" | "pause" | "resume" | "read_file";
/** Z85 text of 40 characters each, by zeromq's names: the engine's public key, and the client's own two. */
export type CurveKeys = { curveServerKey: string; curvePublicKey: string; curveSecretKey: string };
export type GenerateOptions = { requestId?: string; priority?: number; cacheSalt?: string; signal?: AbortSignal };
/** A socket of whole messages, such as a zeromq Dealer: silence for receiveTimeout ms is an error "EAGAIN". */
export type FrameSocket = Pick<Dealer, "receiveTimeout" | "send" | "close"> & AsyncIterable<Uint8Array[]>;

const SILENCE_MS = 10_000;
const MAX_FILE_BYTES = 64 * 2 ** 20;

export class Engine implements AsyncDisposable {
  /** What the engine said of itself: model card, limits, capabilities. */
  readonly welcome!: Welcome;
  #error: EngineError | undefined;
  #sending = Promise.resolve();
  #numCalls = 0;
  #answers = new EventEmitter().setMaxListeners(0).on("error", () => {}); // "welcome" and, by call ids, replies
  #streams = new Map<string, EventEmitter>(); // by request id; of requests that have not ended; they emit "news"
  #requestIds = new Map<number, string>(); // by handle

  private constructor(private readonly socket: FrameSocket) {}

  /** Open a session. Throws EngineError if no engine answers within timeoutMs, or if it refuses. */
  static async connect(endpoint: string, { keys, timeoutMs }: { keys?: CurveKeys; timeoutMs?: number } = {}) {
    const limits = { sendHighWaterMark: 1000, receiveHighWaterMark: 1000, maxMessageSize: 16 * 2 ** 20 };
    const socket = new Dealer({ ...limits, ...keys, sendTimeout: SILENCE_MS, linger: 200 });
    socket.connect(endpoint);
    return Engine.open(socket, timeoutMs);
  }

  /** Open a session over any socket of whole messages; the session owns it. */
  static async open(socket: FrameSocket, timeoutMs = SILENCE_MS): Promise<Engine> {
    const engine = new Engine(socket);
    socket.receiveTimeout = timeoutMs;
    engine.#receive().catch((error) => engine.#fail(error));
    const hello = { protocol: PROTOCOL_VERSION, client: "nanocore-client (node)" };
    (engine as { welcome: Welcome }).welcome = await engine.#call("welcome", Op.HELLO, hello);
    return engine;
  }

  /**
   * Submit a request and stream its output. Leaving the loop, or the signal, aborts it. Without sampling parameters the
   * model card's defaults apply. Throws EngineError, or the signal's reason.
   */
  async *generate(promptTokenIds: ArrayLike<number>, sampling?: SamplingParams, options: GenerateOptions = {}) {
    const { requestId = randomUUID(), signal, ...rest } = options;
    signal?.throwIfAborted();
    if (this.#error) throw this.#error;
    if (this.#streams.has(requestId)) throw new EngineError("duplicate_request_id", `${requestId} is in use`);
    this.#send(Op.SUBMIT, toWire({ requestId, promptTokenIds: packInt32(promptTokenIds), sampling, ...rest }));
    const stream = new EventEmitter();
    const news = on(stream, "news"); // collects from now on
    this.#streams.set(requestId, stream);
    let left = false;
    const leave = () => {
      if (!left && this.#streams.get(requestId) === stream) this.#send(Op.ABORT, { request_ids: [requestId] });
      left = true;
      stream.emit("news"); // for a reader who waits while the signal comes
    };
    signal?.addEventListener("abort", leave);
    try {
      for await (const [output, error] of news as AsyncIterable<[Output?, EngineError?]>) {
        signal?.throwIfAborted();
        if (!output) throw error;
        yield output;
        if (output.finishReason) return;
      }
    } finally {
      signal?.removeEventListener("abort", leave);
      leave();
    }
  }

  /** Run a CONTROL operation; the reply's `ok` says whether it was done. */
  control(operation: ControlOperation, args: { file?: string; offset?: number } = {}): Promise<Reply> {
    const callId = ++this.#numCalls;
    return this.#call(`${callId}`, Op.CONTROL, { call_id: callId, operation, ...args });
  }

  /** The engine's counters and gauges. */
  async stats(): Promise<Stats> {
    const { stats, message } = await this.control("stats");
    if (stats) return stats;
    throw new EngineError("protocol_error", `the engine gave no stats: ${message}`);
  }

  /** One of the model card's files, its digest verified. */
  async readFile(name: string): Promise<Uint8Array> {
    const chunkBytes = this.welcome.limits.maxFileChunkBytes;
    const { numBytes, sha256 } = this.welcome.model.files.find((file) => file.name === name) ?? { numBytes: NaN };
    if (!(numBytes <= MAX_FILE_BYTES)) throw new EngineError("invalid_request", `file ${name} is none, or too large`);
    const content = new Uint8Array(numBytes);
    const offsets = Array.from({ length: Math.ceil(numBytes / chunkBytes) }, (_, i) => i * chunkBytes).values();
    const fetchChunks = async () => {
      for (let offset of offsets) {
        for (const end = Math.min(offset + chunkBytes, numBytes); offset < end; ) {
          const { data, message } = await this.control("read_file", { file: name, offset });
          if (!data?.length) throw new EngineError("protocol_error", `file ${name} ends at byte ${offset}: ${message}`);
          content.set(data.subarray(0, end - offset), offset);
          offset += data.length;
        }
      }
    };
    await Promise.all([fetchChunks(), fetchChunks(), fetchChunks(), fetchChunks()]);
    if (createHash("sha256").update(content).digest("hex") === sha256) return content;
    throw new EngineError("protocol_error", `file ${name} does not have the digest that the model card gives`);
  }

  /** Say BYE and close; open requests fail. Idempotent. */
  async close(): Promise<void> {
    this.#send(Op.BYE, { reason: "the client is done" });
    await this.#sending;
    this.#fail(new EngineError("no_session", "this client is closed"));
  }

  [Symbol.asyncDispose] = () => this.close();

  /** Send what has one answer, and wait for it. */
  async #call(answer: string, op: number, body: object): Promise<any> {
    if (this.#error) throw this.#error;
    this.#send(op, body);
    return (await once(this.#answers, answer))[0];
  }

  /** Queue one message: the socket takes one at a time. */
  #send(op: number, body: object): void {
    const frames = encode(op, body);
    const limit = this.welcome?.limits.maxFrameBytes ?? Infinity;
    if (frames[1].length > limit) throw new EngineError("invalid_request", `a message may have at most ${limit} bytes`);
    if (this.#error) return;
    this.#sending = this.#sending.then(() => this.socket.send(frames)).catch((error) => this.#fail(error));
  }

  async #receive(): Promise<void> {
    for await (const frames of this.socket) this.#take(decode(frames));
  }

  #take(message: EngineMessage): void {
    if (message.op === Op.OUTPUT) {
      for (const [handle, output] of unpackOutput(message)) {
        const requestId = this.#requestIds.get(handle) ?? "";
        this.#streams.get(requestId)?.emit("news", output);
        if (output.finishReason) this.#requestIds.delete(handle) && this.#streams.delete(requestId);
      }
    } else if (message.op === Op.PING) this.#send(Op.PONG, { nonce: message.nonce });
    else if (message.op === Op.ACCEPTED) this.#requestIds.set(message.handle, message.requestId);
    else if (message.op === Op.WELCOME) {
      this.socket.receiveTimeout = SILENCE_MS; // the loop's next receiving heeds it
      this.#answers.emit("welcome", message);
    } else if (message.op === Op.REPLY) this.#answers.emit(`${message.callId}`, message);
    else if (message.op === Op.REFUSED) throw new EngineError("protocol_error", message.message);
    else if (message.op === Op.BYE) throw new EngineError("engine_dead", `the engine has stopped: ${message.reason}`);
    else if (message.op === Op.ERROR) {
      const error = new EngineError(message.code, message.message, message.retryAfterS);
      if (!message.requestId || error.code === "engine_dead" || error.code === "no_session") throw error;
      this.#streams.get(message.requestId)?.emit("news", undefined, error);
      this.#streams.delete(message.requestId);
    }
  }

  /** End the session: everyone who waits gets the error. The first one counts. */
  #fail(cause: unknown): void {
    if (this.#error) return;
    const error = (this.#error = cause instanceof EngineError ? cause : this.#socketError(cause as Error));
    this.socket.close();
    this.#answers.emit("error", error);
    for (const stream of this.#streams.values()) stream.emit("news", undefined, error);
  }
  #socketError({ code, message }: Error & { code?: string }): EngineError {
    if (code !== "EAGAIN") return new EngineError("protocol_error", `the socket failed: ${message}`);
    return new EngineError("engine_dead", `the engine was silent for ${this.socket.receiveTimeout / 1000} s`);
  }
}
