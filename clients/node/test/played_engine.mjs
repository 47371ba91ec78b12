/**
 * An engine that a test plays, over a real socket: what clients send is in `sent`, and `say` answers the client that
 * spoke last. It answers HELLO by itself, with `welcome` if there is one.
 */
import { EventEmitter, once } from "node:events";
import { decode } from "@msgpack/msgpack";
import { Router } from "zeromq";
import { encode, Engine, Op } from "nanocore-client";

const card = {
  model: "tiny",
  architecture: "T",
  dtype: "float32",
  vocab_size: 8,
  max_model_len: 64,
  eos_token_ids: [2],
  block_size: 16,
  num_blocks: 4,
};
const limits = {
  max_frame_bytes: 1000,
  max_num_seqs: 4,
  ping_interval_ms: 1000,
  session_timeout_ms: 30000,
};

export const welcome = (model = {}) => ({
  protocol: [1, 6],
  session: "s",
  engine_instance: "i",
  model: { ...card, ...model },
  limits,
});

/** Integers below 256 as a column. */
export const column = (...values) => Uint8Array.from(values.flatMap((value) => [value, 0, 0, 0]));

let numPlayed = 0;

export class PlayedEngine {
  endpoint = `inproc://played-${++numPlayed}`;
  sent = [];
  #events = new EventEmitter().setMaxListeners(0);
  #router;
  #client;
  #numPings = 1000; // nonces that no vector has
  #saying = Promise.resolve();

  /** Bound until the test's end. context: the test's. socketOptions: for CURVE, with another endpoint. */
  static async start(context, { welcome: answer = welcome(), endpoint, ...socketOptions } = {}) {
    const played = new PlayedEngine();
    played.#router = new Router({ linger: 0, ...socketOptions });
    await played.#router.bind(endpoint ?? played.endpoint);
    played.endpoint = played.#router.lastEndpoint;
    context.after(() => played.#router.close());
    void played.#receive(answer);
    return played;
  }

  async #receive(answer) {
    for await (const [client, op, body] of this.#router) {
      this.#client = client;
      this.sent.push({ op: op[0], body: decode(body) });
      if (op[0] === Op.HELLO && answer) this.say(Op.WELCOME, answer);
      this.#events.emit("sent");
    }
  }

  say(op, body) {
    this.sayFrames(encode(op, body));
  }

  /** Failures are not heard: a router drops what is for a client that has gone. */
  sayFrames(frames) {
    const message = [this.#client, ...frames];
    this.#saying = this.#saying.then(() => this.#router.send(message));
  }

  /** The first message of this op that a client sends, or has sent, after the first `skip` ones of it. */
  async message(op, skip = 0) {
    return (await this.#until(() => this.sent.filter((message) => message.op === op)[skip])).body;
  }

  /** Send PING and wait for its PONG. */
  async ping() {
    const nonce = ++this.#numPings;
    this.say(Op.PING, { nonce });
    await this.#until(() =>
      this.sent.find(({ op, body }) => op === Op.PONG && body.nonce === nonce),
    );
  }

  async #until(find) {
    for (;;) {
      const found = find();
      if (found) return found;
      await once(this.#events, "sent");
    }
  }

  /** How many messages of this op a client has sent that has said BYE. */
  async count(op) {
    await this.message(Op.BYE);
    return this.sent.filter((message) => message.op === op).length;
  }

  /** Answer a SUBMIT. */
  async accept(handle, skip = 0) {
    const { request_id } = await this.message(Op.SUBMIT, skip);
    this.say(Op.ACCEPTED, { request_id, handle, seed: 1 });
  }
}

/** A played engine, and a session with it. */
export async function open(context, model) {
  const played = await PlayedEngine.start(context, { welcome: welcome(model) });
  return { played, engine: await Engine.connect(played.endpoint) };
}
