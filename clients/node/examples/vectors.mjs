/**
 * Check the library's codec against the protocol's conformance vectors:
 *
 *     node vectors.mjs VECTORS.jsonl
 */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { decode, encode, EngineError, Op, unpack, unpackOutput } from "nanocore-client";

const BIN = new Set(["prompt_token_ids", "handles", "tokens", "counts", "data"]);

const bytes = (hex) => new Uint8Array(Buffer.from(hex, "hex"));
const camel = (name) => name.replace(/_(.)/g, (_, letter) => letter.toUpperCase());
/** A vector's message with its bin fields, which are there in hexadecimal, as bytes. */
const body = (message) =>
  Object.fromEntries(Object.entries(message).map(([k, v]) => [k, BIN.has(k) && v !== null ? bytes(v) : v]));
/** What is decoded must say the same as the message; defaults, and fields that are unknown, it may have besides. */
function compare(decoded, expected, rename) {
  if (expected === null) return assert.ok(decoded === null || decoded === undefined);
  if (ArrayBuffer.isView(decoded)) {
    const size = decoded.BYTES_PER_ELEMENT;
    const column = new Uint8Array(size * decoded.length);
    const view = new DataView(column.buffer);
    decoded.forEach((value, i) => (size === 1 ? view.setUint8(i, value) : view.setInt32(4 * i, value, true)));
    return assert.deepEqual(column, new Uint8Array(expected));
  }
  if (!(expected instanceof Object)) return assert.equal(decoded, expected);
  if (Array.isArray(expected)) assert.equal(decoded.length, expected.length);
  for (const [key, value] of Object.entries(expected)) compare(decoded[rename(key)], value, rename);
}

const checks = {
  /** Every valid message is decoded to what it says. */
  decoded({ sender, frames, message }) {
    if (!message) return false;
    const raw = unpack(frames.map(bytes));
    compare(raw.body, body(message), (key) => key);
    if (sender === "engine") compare(decode(frames.map(bytes)), body(message), camel);
    return true;
  },
  /** A canonical one is encoded to the same bytes. */
  encoded({ frames, message, canonical }) {
    if (!canonical) return false;
    assert.deepEqual(encode(parseInt(frames[0], 16), body(message)).map((f) => Buffer.from(f).toString("hex")), frames);
    return true;
  },
  /** What an engine must not send is refused. */
  refused({ sender, frames, error }) {
    if (sender !== "engine" || !error) return false;
    const take = () => {
      const message = decode(frames.map(bytes));
      if (message.op === Op.OUTPUT) unpackOutput(message); // whose columns may not fit together
    };
    assert.throws(take, (thrown) => thrown instanceof EngineError && thrown.code === error);
    return true;
  },
};

const counts = Object.fromEntries(Object.keys(checks).map((name) => [name, 0]));
let numFailed = 0;
for (const line of readFileSync(process.argv[2], "utf8").trim().split("\n")) {
  const vector = JSON.parse(line);
  for (const [name, check] of Object.entries(checks)) {
    try {
      counts[name] += check(vector);
    } catch (error) {
      numFailed += 1;
      console.error(`${vector.name} is not ${name}: ${error.message}`);
    }
  }
}
for (const [name, count] of Object.entries(counts)) console.log(`${name}: ${count}`);
console.log(`failed: ${numFailed}`);
process.exitCode = numFailed ? 1 : 0;
