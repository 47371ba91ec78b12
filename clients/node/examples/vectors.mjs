/**
 * Check the library's codec against the protocol's conformance vectors:
 *
 *     node vectors.mjs VECTORS.jsonl
 */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { decode, encode, EngineError, Op, unpackOutput } from "nanocore-client";

const BIN = new Set(["prompt_token_ids", "output_token_ids", "handles", "tokens", "counts", "data", "embedding"]);

const bytes = (hex) => new Uint8Array(Buffer.from(hex, "hex"));
const hex = (bytes) => Buffer.from(bytes).toString("hex");
/** A vector's message with its bin fields, which are there in hexadecimal, as bytes. */
const body = (message) => {
  const value = (k, v) => {
    if (k.endsWith("logprobs") && v instanceof Object) return columns(v);
    if (k === "events") return v.map(body);
    return BIN.has(k) && v !== null ? bytes(v) : v;
  };
  return Object.fromEntries(Object.entries(message).map(([k, v]) => [k, value(k, v)]));
};
/** A map of log probabilities has bins alone. */
const columns = (map) => Object.fromEntries(Object.entries(map).map(([k, v]) => [k, bytes(v)]));
/** What is decoded must say the same as the message; fields that are unknown it may have besides. */
function compare(decoded, message) {
  if (decoded instanceof Uint8Array) return assert.equal(hex(decoded), message);
  if (!(message instanceof Object)) return assert.equal(decoded, message);
  assert.equal(Array.isArray(decoded), Array.isArray(message));
  if (Array.isArray(message)) assert.equal(decoded.length, message.length);
  for (const [key, value] of Object.entries(message)) compare(decoded[key], value);
}
/** Take a message of an engine as a session does; returns how that went. */
function take(frames) {
  try {
    const message = decode(frames.map(bytes));
    if (message.op === Op.OUTPUT) unpackOutput(message); // whose columns may not fit together
    return "taken";
  } catch (error) {
    assert.ok(error instanceof EngineError && error.code === "protocol_error", error);
    return "refused";
  }
}

/** The names of what was checked with a vector. Throws where the library is wrong. */
function* check({ sender, frames, message, canonical, error, strict }) {
  if (canonical) {
    assert.deepEqual(encode(parseInt(frames[0], 16), body(message)).map(hex), frames);
    yield "encoded";
  }
  if (sender !== "engine") return;
  if (error) {
    const outcome = take(frames);
    assert.ok(strict || outcome === "refused", "a malformed message is taken");
    yield strict ? `strict, ${outcome}` : outcome; // what is marked strict may be either
  } else {
    compare(decode(frames.map(bytes)), message);
    assert.equal(take(frames), "taken");
    yield "decoded";
  }
}

const counts = {
  decoded: 0,
  encoded: 0,
  refused: 0,
  "strict, refused": 0,
  "strict, taken": 0,
  failed: 0,
};
for (const line of readFileSync(process.argv[2], "utf8").trim().split("\n")) {
  const vector = JSON.parse(line);
  try {
    for (const name of check(vector)) counts[name] += 1;
  } catch (error) {
    counts.failed += 1;
    console.error(`${vector.name}: ${error.message}`);
  }
}
for (const [name, count] of Object.entries(counts)) console.log(`${name}: ${count}`);
process.exitCode = counts.failed ? 1 : 0;
