import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { test } from "node:test";
import { curveKeyPair } from "zeromq";
import { Engine, Op } from "nanocore-client";
import { column, open, PlayedEngine, welcome } from "./played_engine.mjs";

async function collect(outputs) {
  const all = [];
  for await (const output of outputs) all.push(output);
  return all;
}

test("the session opens with HELLO and tells what the engine said of itself", async (context) => {
  const { played, engine } = await open(context);
  assert.deepEqual((await played.message(Op.HELLO)).protocol, [1, 14]);
  assert.equal(engine.welcome.model.vocab_size, 8);
  await engine.close();
  assert.equal(await played.count(Op.BYE), 1);
});

test("an engine that refuses is told in an error", async (context) => {
  const played = await PlayedEngine.start(context, { welcome: null });
  const connecting = assert.rejects(Engine.connect(played.endpoint), {
    code: "protocol_error",
    message: "other version",
  });
  await played.message(Op.HELLO);
  played.say(Op.REFUSED, { message: "other version", supported: [[2, 0]] });
  await connecting;
});

test("an engine that is full says when to try again", async (context) => {
  const played = await PlayedEngine.start(context, { welcome: null });
  const full = { code: "overloaded", message: "64 clients", retryAfterS: 2 };
  const connecting = assert.rejects(Engine.connect(played.endpoint), full);
  await played.message(Op.HELLO);
  played.say(Op.REFUSED, { message: "64 clients", supported: [[1, 6]], retry_after_s: 2 });
  await connecting;
});

test("a WELCOME of another major version opens no session", async (context) => {
  const played = await PlayedEngine.start(context, { welcome: { ...welcome(), protocol: [2, 0] } });
  await assert.rejects(Engine.connect(played.endpoint), {
    code: "protocol_error",
    message: /WELCOME/,
  });
});

test("PING is answered with its nonce", async (context) => {
  const { played, engine } = await open(context);
  played.say(Op.PING, { nonce: 2 ** 53 - 1 });
  assert.deepEqual(await played.message(Op.PONG), { nonce: 2 ** 53 - 1 });
  await engine.close();
});

test("each request gets its own tokens, with counts, and its end", async (context) => {
  const { played, engine } = await open(context);
  const requests = ["a", "b"].map((request_id) =>
    collect(engine.generate([1], { max_tokens: 3 }, { request_id })),
  );
  await played.accept(7, 0);
  await played.accept(9, 1);
  played.say(Op.OUTPUT, {
    handles: column(9, 7, 5),
    tokens: column(1, 2, 0),
    events: [{ handle: 7, num_cached_tokens: 1 }],
  });
  played.say(Op.OUTPUT, {
    handles: column(7, 9),
    tokens: column(3, 4, 5),
    counts: column(2, 1),
    events: [
      { handle: 9, finish_reason: "stop", stop_reason: 5 },
      { handle: 8, finish_reason: "stop" },
    ],
  });
  played.say(Op.OUTPUT, { events: [{ handle: 7, finish_reason: "length" }] });
  const [a, b] = await Promise.all(requests);
  assert.deepEqual(a, [
    { index: 0, token_ids: [2], num_cached_tokens: 1 },
    { index: 0, token_ids: [3, 4] },
    { index: 0, token_ids: [], finish_reason: "length" },
  ]);
  assert.deepEqual(b, [
    { index: 0, token_ids: [1] },
    { index: 0, token_ids: [5], finish_reason: "stop", stop_reason: 5 },
  ]);
  assert.deepEqual((await played.message(Op.SUBMIT)).sampling, { max_tokens: 3 });
  await engine.close();
  assert.equal(await played.count(Op.ABORT), 0);
});

test("leaving the loop aborts once, and not after the end", async (context) => {
  const { played, engine } = await open(context);
  const outputs = engine.generate([1], undefined, { request_id: "a" });
  const first = outputs.next();
  await played.accept(7);
  played.say(Op.OUTPUT, { handles: column(7), tokens: column(1) });
  await first;
  await outputs.return();
  await outputs.return();
  assert.deepEqual(await played.message(Op.ABORT), { request_ids: ["a"] });
  played.say(Op.OUTPUT, { events: [{ handle: 7, finish_reason: "abort" }] });
  await played.ping(); // so the end was taken in, and the id is free
  const again = collect(engine.generate([1], undefined, { request_id: "a" }));
  await played.accept(8, 1);
  played.say(Op.OUTPUT, {
    handles: column(8),
    tokens: column(4),
    events: [{ handle: 8, finish_reason: "stop" }],
  });
  assert.deepEqual(await again, [{ index: 0, token_ids: [4], finish_reason: "stop" }]);
  await engine.close();
  assert.equal(await played.count(Op.ABORT), 1);
});

test("a signal aborts at once and once, as an AbortError", async (context) => {
  const { played, engine } = await open(context);
  const controller = new AbortController();
  const outputs = collect(engine.generate([1], undefined, { signal: controller.signal }));
  await played.accept(7);
  const reason = new Error("enough");
  controller.abort(reason);
  await assert.rejects(outputs, { name: "AbortError", cause: reason });
  const { request_id } = await played.message(Op.SUBMIT);
  assert.deepEqual(await played.message(Op.ABORT), { request_ids: [request_id] });
  await assert.rejects(engine.generate([1], undefined, { signal: controller.signal }).next(), {
    name: "AbortError",
  });
  await engine.close();
  assert.deepEqual([await played.count(Op.SUBMIT), await played.count(Op.ABORT)], [1, 1]);
});

test("samples of one request are told apart, and end one by one", async (context) => {
  const { played, engine } = await open(context);
  const sampling = { n: 2, logprobs: 1 };
  const outputs = engine.generate([1], sampling, { request_id: "a" });
  const all = collect(outputs);
  await played.accept(7);
  played.say(Op.OUTPUT, { handles: column(8, 7), tokens: column(1, 2) });
  await played.ping();
  engine.abort("a", 1);
  engine.abort("a", 2); // there is none
  const { request_ids, handles } = await played.message(Op.ABORT);
  assert.deepEqual([request_ids, [...handles]], [[], [8, 0, 0, 0]]);
  played.say(Op.OUTPUT, { events: [{ handle: 8, finish_reason: "abort" }] });
  played.say(Op.OUTPUT, {
    handles: column(7),
    tokens: column(3),
    events: [{ handle: 7, finish_reason: "length" }],
  });
  assert.deepEqual(await all, [
    { index: 1, token_ids: [1] },
    { index: 0, token_ids: [2] },
    { index: 1, token_ids: [], finish_reason: "abort" },
    { index: 0, token_ids: [3], finish_reason: "length" },
  ]);
  assert.deepEqual((await played.message(Op.SUBMIT)).sampling, sampling);
  await engine.close();
  assert.equal(await played.count(Op.ABORT), 1);
});

test("an engine of 1.4 is not sent parameters of 1.5", async (context) => {
  const played = await PlayedEngine.start(context, { welcome: { ...welcome(), protocol: [1, 4] } });
  const engine = await Engine.connect(played.endpoint);
  const newer = { code: "invalid_request", message: "logprobs needs an engine of protocol 1.5" };
  await assert.rejects(engine.generate([1], { top_k: 1, logprobs: 0 }).next(), newer);
  await assert.rejects(engine.generate([1], { n: 2 }).next(), { message: /^n needs/ });
  const old = collect(engine.generate([1], { top_k: 1, n: undefined }));
  await played.accept(7);
  played.say(Op.OUTPUT, { events: [{ handle: 7, finish_reason: "length" }] });
  assert.equal((await old).length, 1);
  await engine.close();
  assert.equal(await played.count(Op.SUBMIT), 1);
});

test("an engine of 1.5 is not sent structured outputs", async (context) => {
  const played = await PlayedEngine.start(context, { welcome: { ...welcome(), protocol: [1, 5] } });
  const engine = await Engine.connect(played.endpoint);
  const message = "structured_outputs needs an engine of protocol 1.6";
  const sampling = { n: 1, structured_outputs: { json_object: true } };
  await assert.rejects(engine.generate([1], sampling).next(), { code: "invalid_request", message });
  await engine.close();
  assert.equal(await played.count(Op.SUBMIT), 0);
});

test("a schema's answer may be overtaken, and its refusal is its own", async (context) => {
  const { played, engine } = await open(context);
  const structured_outputs = { json: JSON.stringify({ type: "integr" }) };
  const refused = collect(engine.generate([1], { structured_outputs }, { request_id: "a" }));
  const next = collect(engine.generate([1], undefined, { request_id: "b" }));
  await played.accept(7, 1);
  played.say(Op.OUTPUT, { handles: column(7), tokens: column(3) });
  const error = { code: "invalid_request", message: "structured_outputs.json: at /type" };
  played.say(Op.ERROR, { ...error, request_id: "a" });
  await assert.rejects(refused, error);
  played.say(Op.OUTPUT, { events: [{ handle: 7, finish_reason: "length" }] });
  assert.deepEqual(
    (await next).flatMap(({ token_ids }) => token_ids),
    [3],
  );
  assert.deepEqual((await played.message(Op.SUBMIT)).sampling, { structured_outputs });
  await engine.close();
});

test("an error about a request is its own, typed", async (context) => {
  const { played, engine } = await open(context);
  const refused = collect(engine.generate([1], undefined, { request_id: "a" }));
  await played.message(Op.SUBMIT);
  played.say(Op.ERROR, {
    code: "overloaded",
    message: "full",
    request_id: "a",
    retry_after_s: 1.5,
  });
  await assert.rejects(refused, {
    name: "EngineError",
    code: "overloaded",
    message: "full",
    retryAfterS: 1.5,
  });
  const next = collect(engine.generate([1], undefined, { request_id: "a" }));
  await played.accept(1, 1);
  played.say(Op.OUTPUT, { events: [{ handle: 1, finish_reason: "length" }] });
  assert.equal((await next).length, 1);
  await engine.close();
  assert.equal(await played.count(Op.ABORT), 0);
});

test("an id in use is refused here, and close fails what is open", async (context) => {
  const { played, engine } = await open(context);
  const first = engine.generate([1], undefined, { request_id: "a" }).next();
  await played.accept(1);
  await assert.rejects(engine.generate([1], undefined, { request_id: "a" }).next(), {
    code: "duplicate_request_id",
  });
  await Promise.all([
    assert.rejects(first, { code: "no_session" }),
    engine.close(),
    engine.close(),
  ]);
  assert.equal(await played.count(Op.SUBMIT), 1);
  assert.equal(await played.count(Op.BYE), 1);
});

const ends = {
  BYE: [(played) => played.say(Op.BYE, { reason: "told to stop" }), "engine_dead"],
  "ERROR engine_dead": [
    (played) => played.say(Op.ERROR, { code: "engine_dead", message: "" }),
    "engine_dead",
  ],
  "an ERROR about nothing": [
    (played) => played.say(Op.ERROR, { code: "unknown_op", message: "" }),
    "unknown_op",
  ],
  "a malformed message": [(played) => played.sayFrames([Uint8Array.of(0x12)]), "protocol_error"],
  "an unknown op": [(played) => played.say(0x42, {}), "protocol_error"],
};
for (const [name, [end, code]] of Object.entries(ends)) {
  test(`${name} fails everything open, after what has arrived was read`, async (context) => {
    const { played, engine } = await open(context);
    const outputs = engine.generate([1]);
    const first = outputs.next();
    const stats = assert.rejects(engine.stats(), { code });
    await played.accept(7);
    played.say(Op.OUTPUT, { handles: column(7), tokens: column(1) });
    end(played);
    assert.deepEqual((await first).value.token_ids, [1]);
    await assert.rejects(outputs.next(), { code });
    await stats;
    await assert.rejects(engine.generate([1]).next(), { code });
    await assert.rejects(engine.control("pause"), { code });
    await engine.close();
  });
}

test("an engine that falls silent is dead, and a request and a call end", async (context) => {
  const played = await PlayedEngine.start(context);
  const engine = await Engine.connect(played.endpoint, { timeoutMs: 2000 });
  const dead = { code: "engine_dead", message: /silent for 2 s/ };
  await Promise.all([
    assert.rejects(engine.generate([1]).next(), dead),
    assert.rejects(engine.stats(), dead),
  ]);
});

test("an endpoint where nobody answers fails in time", async (context) => {
  const { endpoint } = await PlayedEngine.start(context, { welcome: null });
  await assert.rejects(Engine.connect(endpoint, { timeoutMs: 20 }), { code: "engine_dead" });
});

test("a file is read in chunks, and its size and digest are verified", async (context) => {
  const content = Buffer.from("0123456789");
  const sha256 = createHash("sha256").update(content).digest("hex");
  const good = { name: "good", num_bytes: 10, sha256 };
  const files = [
    good,
    { ...good, name: "bad", sha256: sha256.replace(/./, "x") },
    { ...good, name: "long", num_bytes: 9 },
    { ...good, name: "short", num_bytes: 11 },
    { ...good, name: "huge", num_bytes: 2 ** 26 + 1 },
  ];
  const { played, engine } = await open(context, { files });
  const serve = async () => {
    for (let i = 0; ; i++) {
      const { call_id, offset } = await played.message(Op.CONTROL, i);
      played.say(Op.REPLY, { call_id, data: content.subarray(offset, offset + 4) });
    }
  };
  void serve();
  assert.deepEqual(Buffer.from(await engine.readFile("good")), content);
  await assert.rejects(engine.readFile("bad"), { code: "protocol_error", message: /digest/ });
  await assert.rejects(engine.readFile("long"), { code: "protocol_error", message: /digest/ });
  await assert.rejects(engine.readFile("short"), { code: "protocol_error", message: /ends at 10/ });
  await assert.rejects(engine.readFile("huge"), { code: "invalid_request" });
  await assert.rejects(engine.readFile("none"), { code: "invalid_request" });
  await engine.close();
});

test("CURVE keys open a session over TCP, and without them there is none", async (context) => {
  const [server, client] = [curveKeyPair(), curveKeyPair()];
  const curve = {
    curveServer: true,
    curveSecretKey: server.secretKey,
    endpoint: "tcp://127.0.0.1:*",
  };
  const { endpoint } = await PlayedEngine.start(context, curve);
  const keys = {
    curveServerKey: server.publicKey,
    curvePublicKey: client.publicKey,
    curveSecretKey: client.secretKey,
  };
  const engine = await Engine.connect(endpoint, { keys });
  assert.equal(engine.welcome.session, "s");
  await engine.close();
  await assert.rejects(Engine.connect(endpoint), { code: "invalid_request", message: /CURVE/ });
});

/** A session that goes on with the next one, and a stream whose first token is 5. */
async function begun(context) {
  const played = await PlayedEngine.start(context, { welcome: { ...welcome(), protocol: [1, 9] } });
  const engine = await Engine.connect(played.endpoint, { resumeMs: 60_000 });
  const outputs = engine.generate([1], { max_tokens: 3, n: 1, prompt_logprobs: 0 }, { priority: 2 });
  const first = outputs.next();
  await played.accept(7);
  played.say(Op.OUTPUT, { handles: column(7), tokens: column(5) });
  assert.deepEqual((await first).value.token_ids, [5]);
  return { played, engine, outputs };
}

test("a stream goes on behind its tokens, in the next session", async (context) => {
  const { played, engine, outputs } = await begun(context);
  const next = outputs.next();
  played.say(Op.DRAINING, { deadline_ms: 0 });
  played.say(Op.OUTPUT, { events: [{ handle: 7, finish_reason: "abort", message: "SIGTERM" }] });
  played.say(Op.BYE, {});
  await played.accept(9, 1);
  const { request_id, ...submit } = await played.message(Op.SUBMIT, 1);
  assert.match(request_id, /\.0$/);
  assert.deepEqual(submit, {
    prompt_token_ids: Buffer.from(column(1)),
    output_token_ids: Buffer.from(column(5)),
    sampling: { max_tokens: 3, seed: 1 },
    priority: 2,
  });
  const events = [{ handle: 9, finish_reason: "timeout" }];
  played.say(Op.OUTPUT, { handles: column(9), tokens: column(6), events });
  const { value } = await next;
  assert.deepEqual([value.token_ids, value.finish_reason], [[6], "timeout"]);
  assert.equal((await outputs.next()).done, true);
  await engine.close();
});

test("what an engine that drains refuses is submitted to the next one", async (context) => {
  const { played, engine } = await begun(context);
  const outputs = collect(engine.generate([2]));
  const { request_id } = await played.message(Op.SUBMIT, 1);
  played.say(Op.ERROR, { code: "draining", message: "", request_id, retry_after_s: 1 });
  played.say(Op.BYE, {});
  const other = await played.message(Op.SUBMIT, 2);
  assert.deepEqual(other, await played.message(Op.SUBMIT, 1));
  await played.accept(9, 2);
  played.say(Op.OUTPUT, { events: [{ handle: 9, finish_reason: "stop" }] });
  assert.equal((await outputs).length, 1);
  await engine.close();
});

test("a stream that gets nothing from three engines in a row fails", async (context) => {
  const { played, engine, outputs } = await begun(context);
  const failing = assert.rejects(outputs.next(), { code: "engine_dead" });
  for (const skip of [1, 2]) {
    played.say(Op.BYE, {});
    await played.accept(9, skip);
  }
  played.say(Op.BYE, {});
  await failing;
  await engine.close();
});

test("a stream that an engine before 1.9 cannot go on with fails", async (context) => {
  const { played, engine } = await open(context);
  await engine.close();
  const resuming = await Engine.connect(played.endpoint, { resumeMs: 60_000 });
  const outputs = resuming.generate([1]);
  const first = outputs.next();
  await played.accept(7);
  played.say(Op.OUTPUT, { handles: column(7), tokens: column(5) });
  await first;
  played.say(Op.BYE, {});
  await assert.rejects(outputs.next(), { message: "output_token_ids needs an engine of protocol 1.9" });
  await resuming.close();
});
