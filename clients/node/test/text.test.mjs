import assert from "node:assert/strict";
import { test } from "node:test";
import { IncrementalText, StopStrings } from "../examples/text.mjs";

/** A tokenizer whose tokens are bytes. */
const decode = (tokenIds) => new TextDecoder().decode(Uint8Array.from(tokenIds));

test("text comes in whole characters, however the tokens are cut", () => {
  const text = "aé→🌍\n";
  for (const size of [1, 2, 3, 100]) {
    const incremental = new IncrementalText(decode, [0x20]);
    const tokenIds = [...new TextEncoder().encode(text)];
    const pieces = [];
    while (tokenIds.length) pieces.push(incremental.push(tokenIds.splice(0, size)));
    assert.equal(pieces.join(""), text);
    assert.ok(!pieces.some((piece) => piece.includes("\ufffd")));
  }
});

test("half a character at the end is not shown", () => {
  assert.equal(new IncrementalText(decode, []).push([0x61, 0xe2, 0x86]), "a");
});

test("a stop string is found although it is cut, and nothing of it is shown", () => {
  const stops = new StopStrings(["STOP", "TO"]);
  const shown = [..."xSSTxSTyTO!"].map((piece) => stops.push(piece));
  assert.equal(
    shown
      .map(({ text }) => text)
      .slice(0, 10)
      .join(""),
    "xSSTxSTy",
  );
  assert.equal(shown[9].stop, "TO");
});

test("what might have become a stop string is shown at the end", () => {
  const stops = new StopStrings(["STOP"]);
  assert.equal(stops.push("a STO").text + stops.flush(), "a STO");
});
