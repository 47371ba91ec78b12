import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { Engine } from "nanocore-client";
import { PlayedEngine } from "./played_engine.mjs";

const path = new URL("../../../conformance/nanocore_conformance/vectors.jsonl", import.meta.url);
const vectors = readFileSync(path, "utf8")
  .trim()
  .split("\n")
  .map((line) => JSON.parse(line));
const malformed = vectors.filter(({ sender, error }) => sender === "engine" && error);

test("after any malformed message a session either has failed or goes on", async (context) => {
  const played = await PlayedEngine.start(context);
  let engine, failed;
  for (const { name, frames, strict } of malformed) {
    engine ??= await Engine.connect(played.endpoint);
    failed ??= assert.rejects(engine.generate([1]).next(), { name: "EngineError" });
    played.sayFrames(frames.map((frame) => Buffer.from(frame, "hex")));
    const outcome = await Promise.race([
      played.ping().then(() => "it goes on"),
      failed.then(() => "it failed"),
    ]);
    assert.ok(strict || outcome === "it failed", `${name}: ${outcome}`);
    if (outcome === "it failed") engine = failed = undefined;
  }
  await engine?.close();
  await failed;
});
