/**
 * The engine's end of a session, in the test's hands: what the client sends is in `sent`, and the
 * client receives what `receive` is given. Like a zeromq socket it takes one message at a time.
 */
import assert from "node:assert/strict";
import { EventEmitter, on, once } from "node:events";
import { encode, Op, unpack } from "nanocore-client";

const card = {
  model: "tiny", architecture: "T", dtype: "float32", vocab_size: 8, max_model_len: 64, eos_token_ids: [2],
  block_size: 16, num_blocks: 4,
};
const limits = { max_frame_bytes: 1000, max_num_seqs: 4, ping_interval_ms: 1000, session_timeout_ms: 30000 };

export const welcome = (model = {}) => ({
  protocol: [1, 3], session: "s", engine_instance: "i", model: { ...card, ...model },
  limits: { ...limits, max_file_chunk_bytes: 4 },
});

/** Integers below 256 as a column. */
export const column = (...values) => Uint8Array.from(values.flatMap((value) => [value, 0, 0, 0]));

export class FakeSocket {
  receiveTimeout = -1;
  sent = [];
  closed = false;
  #events = new EventEmitter();
  #frames = on(this.#events, "frames", { close: ["close"] });
  #isSending = false;

  async send(frames) {
    assert.ok(!this.#isSending, "one message at a time");
    this.#isSending = true;
    await null;
    this.#isSending = false;
    this.sent.push(unpack(frames));
    this.#events.emit("sent");
  }

  close() {
    this.closed = true;
    this.#events.emit("close");
  }

  async *[Symbol.asyncIterator]() {
    for (;;) {
      const silence = Object.assign(new Error("nothing came in time"), { code: "EAGAIN" });
      const timer = setTimeout(() => this.#events.emit("error", silence), this.receiveTimeout);
      const { value, done } = await this.#frames.next();
      clearTimeout(timer);
      if (done) return;
      yield value[0];
    }
  }

  receive(op, body) {
    this.#events.emit("frames", encode(op, body));
  }

  receiveFrames(frames) {
    this.#events.emit("frames", frames);
  }

  /** The first message of this op that the client sends, or has sent, after the first `skip` ones of it. */
  async message(op, skip = 0) {
    for (;;) {
      const found = this.sent.filter((message) => message.op === op)[skip];
      if (found) return found.body;
      await once(this.#events, "sent");
    }
  }

  count(op) {
    return this.sent.filter((message) => message.op === op).length;
  }

  /** Answer a SUBMIT. */
  async accept(handle, skip = 0) {
    const { request_id } = await this.message(Op.SUBMIT, skip);
    this.receive(Op.ACCEPTED, { request_id, handle, seed: 1 });
  }
}
