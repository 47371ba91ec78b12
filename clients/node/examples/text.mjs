/**
 * Token ids to text, piece by piece: whole characters only, and nothing of a stop string.
 */
const CONTEXT_TOKENS = 8;
const MAX_HELD_TOKENS = 16; // a character has four bytes at most: what is held longer will never be one

/** Turns one request's tokens into text. decode: token ids to text. promptTokenIds: context for the first token. */
export class IncrementalText {
  #decode;
  #context; // tokens whose text was given out; a leading space may depend on them
  #held = []; // tokens whose text may be incomplete

  constructor(decode, promptTokenIds) {
    this.#decode = decode;
    this.#context = promptTokenIds.slice(-CONTEXT_TOKENS);
  }

  /** The text that these tokens complete. */
  push(tokenIds) {
    let text = "";
    for (const tokenId of tokenIds) {
      this.#held.push(tokenId);
      const before = this.#decode(this.#context);
      const now = this.#decode([...this.#context, ...this.#held]);
      if (now.endsWith("\ufffd") && this.#held.length < MAX_HELD_TOKENS) continue; // half a character
      text += now.slice(before.length);
      this.#context = [...this.#context, ...this.#held].slice(-CONTEXT_TOKENS);
      this.#held = [];
    }
    return text;
  }
}

/** Finds the first stop string in a text that comes in pieces; holds back what may be the beginning of one. */
export class StopStrings {
  #stops;
  #held = "";

  constructor(stops) {
    this.#stops = stops;
  }

  /** { text: what may be shown, stop: the stop string that was found, if one was }. */
  push(piece) {
    const text = this.#held + piece;
    this.#held = "";
    const found = this.#stops
      .map((stop) => ({ stop, start: text.indexOf(stop) }))
      .filter(({ start }) => start >= 0)
      .sort((a, b) => a.start + a.stop.length - (b.start + b.stop.length))[0];
    if (found) return { text: text.slice(0, found.start), stop: found.stop };
    const numHeld = Math.max(0, ...this.#stops.map((stop) => overlap(text, stop)));
    this.#held = text.slice(text.length - numHeld);
    return { text: text.slice(0, text.length - numHeld) };
  }

  /** What is held back, when no more will come. */
  flush() {
    const text = this.#held;
    this.#held = "";
    return text;
  }
}

/** Length of the longest end of the text that is a beginning of the stop string. */
function overlap(text, stop) {
  for (let length = Math.min(text.length, stop.length - 1); length > 0; length--)
    if (text.endsWith(stop.slice(0, length))) return length;
  return 0;
}
