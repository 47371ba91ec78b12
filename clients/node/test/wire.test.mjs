import assert from "node:assert/strict";
import { test } from "node:test";
import { decode, encode, EngineError, Op, packInt32, unpackOutput } from "nanocore-client";
import { column } from "./played_engine.mjs";

test("a column is little endian", () => {
  assert.deepEqual(
    [...packInt32([1, 258, 2 ** 31 - 1])],
    [1, 0, 0, 0, 2, 1, 0, 0, 255, 255, 255, 127],
  );
});

test("a column is read at any alignment", () => {
  for (const reason of ["", "x", "xx", "xxx"]) {
    const frames = encode(Op.OUTPUT, {
      reason,
      handles: column(7),
      tokens: Uint8Array.of(2, 1, 0, 0),
    });
    assert.deepEqual([...unpackOutput(decode(frames))], [[7, { token_ids: [258] }]]);
  }
});

test("what is no int32 is refused by its column", () => {
  for (const value of [1.5, 2 ** 31, NaN, "1", undefined]) {
    assert.throws(
      () => packInt32([value]),
      (error) => error instanceof EngineError && error.code === "invalid_request",
    );
  }
});

test("undefined fields are not sent", () => {
  assert.deepEqual(Buffer.from(encode(Op.BYE, { reason: undefined })[1]), Buffer.from([0x80]));
});

test("an OUTPUT's columns become tokens by handle, and handles have 32 bits", () => {
  const handles = Uint8Array.of(255, 255, 255, 255, 1, 0, 0, 0);
  const message = decode(
    encode(Op.OUTPUT, { handles, tokens: column(3, 4, 5), counts: column(2, 1) }),
  );
  assert.deepEqual(
    [...unpackOutput(message)],
    [
      [2 ** 32 - 1, { token_ids: [3, 4] }],
      [1, { token_ids: [5] }],
    ],
  );
});

test("columns that do not fit together are refused", () => {
  for (const counts of [column(2, 0), column(1), column(3), column()]) {
    const message = decode(encode(Op.OUTPUT, { handles: column(7), tokens: column(1, 2), counts }));
    assert.throws(() => unpackOutput(message), { code: "protocol_error" });
  }
});

const floats = (...values) => new Uint8Array(Float32Array.from(values).buffer);
const logprobs = {
  handles: column(7, 7),
  ranks: column(1, 2),
  counts: column(2, 1),
  token_ids: column(3, 3, 4),
  logprobs: floats(-0.5, -0.5, -Infinity),
};

test("log probabilities are told with their tokens, and those of a prompt before them", () => {
  const entries = [
    {
      rank: 1,
      candidates: [
        { token_id: 3, logprob: -0.5 },
        { token_id: 3, logprob: -0.5 },
      ],
    },
    { rank: 2, candidates: [{ token_id: 4, logprob: -Infinity }] },
  ];
  const both = decode(
    encode(Op.OUTPUT, {
      handles: column(7),
      tokens: column(3, 4),
      counts: column(2),
      logprobs: { ...logprobs, new_in_9: 1 },
    }),
  );
  assert.deepEqual([...unpackOutput(both)], [[7, { token_ids: [3, 4], logprobs: entries }]]);
  const early = decode(encode(Op.OUTPUT, { logprobs: null, prompt_logprobs: logprobs }));
  assert.deepEqual([...unpackOutput(early)], [[7, { token_ids: [], prompt_logprobs: entries }]]);
});

test("log probabilities that do not fit together are refused", () => {
  for (const name of Object.keys(logprobs))
    for (const cut of [1, 4]) {
      const broken = { ...logprobs, [name]: logprobs[name].slice(0, -cut) };
      const message = decode(encode(Op.OUTPUT, { prompt_logprobs: broken }));
      assert.throws(() => unpackOutput(message), { code: "protocol_error" });
    }
});

test("a malformed message is named in the error", () => {
  assert.throws(() => decode(encode(Op.REPLY, { call_id: "1" })), {
    name: "EngineError",
    code: "protocol_error",
    message: /REPLY/,
  });
});
