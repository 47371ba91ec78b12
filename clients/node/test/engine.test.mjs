import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { test } from "node:test";
import { curveKeyPair, Router } from "zeromq";
import { encode, Engine, Op, unpack } from "nanocore-client";
import { column, FakeSocket, welcome } from "./fake_socket.mjs";

async function open(model, timeoutMs) {
  const socket = new FakeSocket();
  socket.receive(Op.WELCOME, welcome(model));
  return { socket, engine: await Engine.open(socket, timeoutMs) };
}

async function collect(outputs) {
  const all = [];
  for await (const output of outputs) all.push(output);
  return all;
}

test("the session opens with HELLO and tells what the engine said of itself", async () => {
  const { socket, engine } = await open();
  assert.deepEqual((await socket.message(Op.HELLO)).protocol, [1, 3]);
  assert.equal(engine.welcome.model.vocabSize, 8);
  assert.equal(engine.welcome.model.defaultSampling.temperature, 1);
  await engine.close();
  assert.equal(socket.count(Op.BYE), 1);
  assert.ok(socket.closed);
});

test("an engine that refuses is told in an error", async () => {
  const socket = new FakeSocket();
  socket.receive(Op.REFUSED, { message: "another version", supported: [[2, 0]] });
  await assert.rejects(Engine.open(socket), { code: "protocol_error", message: "another version" });
  assert.ok(socket.closed);
});

test("PING is answered with its nonce", async () => {
  const { socket, engine } = await open();
  socket.receive(Op.PING, { nonce: 2 ** 53 - 1 });
  assert.deepEqual(await socket.message(Op.PONG), { nonce: 2 ** 53 - 1 });
  await engine.close();
});

test("each request gets its own tokens, with counts, and its end", async () => {
  const { socket, engine } = await open();
  const requests = ["a", "b"].map((requestId) => collect(engine.generate([1], { maxTokens: 3 }, { requestId })));
  await socket.accept(7, 0);
  await socket.accept(9, 1);
  socket.receive(Op.OUTPUT, { handles: column(9, 7, 5), tokens: column(1, 2, 0), events: [{ handle: 7, num_cached_tokens: 1 }] });
  socket.receive(Op.OUTPUT, {
    handles: column(7, 9), tokens: column(3, 4, 5), counts: column(2, 1),
    events: [{ handle: 9, finish_reason: "stop", stop_reason: 5 }, { handle: 8, finish_reason: "stop" }],
  });
  socket.receive(Op.OUTPUT, { events: [{ handle: 7, finish_reason: "length" }] });
  const [a, b] = await Promise.all(requests);
  assert.deepEqual(a, [{ tokenIds: [2], numCachedTokens: 1 }, { tokenIds: [3, 4] }, { tokenIds: [], finishReason: "length" }]);
  assert.deepEqual(b, [{ tokenIds: [1] }, { tokenIds: [5], finishReason: "stop", stopReason: 5 }]);
  assert.equal(socket.count(Op.ABORT), 0);
  await engine.close();
});

test("leaving the loop aborts once, and not after the end", async () => {
  const { socket, engine } = await open();
  const outputs = engine.generate([1], undefined, { requestId: "a" });
  const first = outputs.next();
  await socket.accept(7);
  socket.receive(Op.OUTPUT, { handles: column(7), tokens: column(1) });
  await first;
  await outputs.return();
  await outputs.return();
  assert.deepEqual(await socket.message(Op.ABORT), { request_ids: ["a"] });
  socket.receive(Op.OUTPUT, { events: [{ handle: 7, finish_reason: "abort" }] });
  socket.receive(Op.PING, {});
  await socket.message(Op.PONG); // so the end was taken in, and the id is free
  const again = collect(engine.generate([1], undefined, { requestId: "a" }));
  await socket.accept(8, 1);
  socket.receive(Op.OUTPUT, { handles: column(8), tokens: column(4), events: [{ handle: 8, finish_reason: "stop" }] });
  assert.deepEqual(await again, [{ tokenIds: [4], finishReason: "stop" }]);
  await engine.close();
  assert.equal(socket.count(Op.ABORT), 1);
});

test("a signal aborts at once and once, and its reason is thrown", async () => {
  const { socket, engine } = await open();
  const controller = new AbortController();
  const outputs = collect(engine.generate([1], undefined, { requestId: "a", signal: controller.signal }));
  await socket.accept(7);
  controller.abort(new Error("enough"));
  await assert.rejects(outputs, /enough/);
  await engine.close();
  assert.equal(socket.count(Op.ABORT), 1);
});

test("a signal aborts although nobody reads", async () => {
  const { socket, engine } = await open();
  const controller = new AbortController();
  const outputs = engine.generate([1], undefined, { signal: controller.signal });
  const first = outputs.next();
  await socket.accept(7);
  socket.receive(Op.OUTPUT, { handles: column(7), tokens: column(1) });
  await first;
  controller.abort(new Error("enough"));
  await socket.message(Op.ABORT);
  await assert.rejects(outputs.next(), /enough/);
  await engine.close();
  assert.equal(socket.count(Op.ABORT), 1);
});

test("an error about a request is its own, typed", async () => {
  const { socket, engine } = await open();
  const refused = collect(engine.generate([1], undefined, { requestId: "a" }));
  await socket.message(Op.SUBMIT);
  socket.receive(Op.ERROR, { code: "overloaded", message: "full", request_id: "a", retry_after_s: 1.5 });
  await assert.rejects(refused, { name: "EngineError", code: "overloaded", retryAfterS: 1.5 });
  const next = collect(engine.generate([1], undefined, { requestId: "a" }));
  await socket.accept(1, 1);
  socket.receive(Op.OUTPUT, { events: [{ handle: 1, finish_reason: "length" }] });
  assert.equal((await next).length, 1);
  await engine.close();
  assert.equal(socket.count(Op.ABORT), 0);
});

test("an id in use, too large a prompt and a lone surrogate are refused here", async () => {
  const { socket, engine } = await open();
  const running = engine.generate([1], undefined, { requestId: "a" });
  const first = running.next();
  await socket.accept(1);
  await assert.rejects(engine.generate([1], undefined, { requestId: "a" }).next(), { code: "duplicate_request_id" });
  await assert.rejects(engine.generate(new Array(300).fill(1)).next(), { code: "invalid_request" });
  await assert.rejects(engine.generate([1], undefined, { cacheSalt: "\ud800" }).next(), { code: "invalid_request" });
  assert.equal(socket.count(Op.SUBMIT), 1);
  await Promise.all([assert.rejects(first, { code: "no_session" }), engine.close()]);
});

const ends = {
  BYE: [(socket) => socket.receive(Op.BYE, { reason: "told to stop" }), "engine_dead"],
  "ERROR engine_dead": [(socket) => socket.receive(Op.ERROR, { code: "engine_dead", message: "" }), "engine_dead"],
  "an ERROR about nothing": [(socket) => socket.receive(Op.ERROR, { code: "protocol_error", message: "" }), "protocol_error"],
  "a malformed message": [(socket) => socket.receiveFrames([Uint8Array.of(0x12)]), "protocol_error"],
  "an unknown op": [(socket) => socket.receive(0x40, {}), "protocol_error"],
};
for (const [name, [end, code]] of Object.entries(ends)) {
  test(`${name} fails everything open, after what has arrived was read`, async () => {
    const { socket, engine } = await open();
    const outputs = engine.generate([1]);
    const first = outputs.next();
    const stats = assert.rejects(engine.stats(), { code });
    await socket.accept(7);
    socket.receive(Op.OUTPUT, { handles: column(7), tokens: column(1) });
    end(socket);
    assert.deepEqual((await first).value.tokenIds, [1]);
    await assert.rejects(outputs.next(), { code });
    await stats;
    await assert.rejects(engine.generate([1]).next(), { code });
    await assert.rejects(engine.control("pause"), { code });
    assert.ok(socket.closed);
    assert.equal(socket.count(Op.ABORT), 0);
    await engine.close();
  });
}

test("ten seconds of silence fail everything open, and less does not", async (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const { socket, engine } = await open({}, 50); // however long opening may take
  const outputs = collect(engine.generate([1]));
  await socket.accept(7);
  context.mock.timers.tick(9_000);
  socket.receive(Op.PING, {});
  await socket.message(Op.PONG);
  context.mock.timers.tick(9_999);
  assert.ok(!socket.closed);
  context.mock.timers.tick(1);
  await assert.rejects(outputs, { code: "engine_dead", message: /10 s/ });
  assert.ok(socket.closed);
  await engine.close();
});

test("an endpoint where nobody answers fails in time, over a real socket", async () => {
  const silent = new Router({ linger: 0 });
  await silent.bind("tcp://127.0.0.1:*");
  await assert.rejects(Engine.connect(silent.lastEndpoint, { timeoutMs: 20 }), { code: "engine_dead" });
  silent.close();
});

test("a file is read in chunks, also short ones, and its digest verified", async () => {
  const content = Buffer.from("0123456789");
  const sha256 = createHash("sha256").update(content).digest("hex");
  const files = [{ name: "good", num_bytes: 10, sha256 }, { name: "bad", num_bytes: 10, sha256: sha256.replace(/./, "x") }];
  const { socket, engine } = await open({ files });
  const serve = async () => {
    for (let i = 0; ; i++) {
      const { call_id, offset } = await socket.message(Op.CONTROL, i);
      socket.receive(Op.REPLY, { call_id, data: content.subarray(offset, offset + (offset === 4 ? 3 : 4)) });
    }
  };
  void serve();
  assert.deepEqual(Buffer.from(await engine.readFile("good")), content);
  await assert.rejects(engine.readFile("bad"), { code: "protocol_error", message: /digest/ });
  await assert.rejects(engine.readFile("none"), { code: "invalid_request" });
  await engine.close();
});

test("CURVE keys open a session over TCP", async (context) => {
  const [server, client] = [curveKeyPair(), curveKeyPair()];
  const router = new Router({ curveServer: true, curveSecretKey: server.secretKey, linger: 0 });
  await router.bind("tcp://127.0.0.1:*");
  context.after(() => router.close());
  const answered = router.receive().then(async ([id, ...frames]) => {
    assert.equal(unpack(frames).op, Op.HELLO);
    await router.send([id, ...encode(Op.WELCOME, welcome())]);
  });
  const keys = { curveServerKey: server.publicKey, curvePublicKey: client.publicKey, curveSecretKey: client.secretKey };
  const engine = await Engine.connect(router.lastEndpoint, { keys });
  await answered;
  assert.equal(engine.welcome.session, "s");
  await engine.close();
});
