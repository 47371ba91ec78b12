// An answer that is coming, in its conversation, whichever conversation is shown.
import { Answer } from "./answer.js";
import { ApiError, BrokenConnection, readEvents, request } from "./api.js";
import { useChatml } from "./settings.js";

const DRAWN_SHARE = 4; // a text that takes long to draw is drawn so much less often

export class Run {
  /**
   * view: shows the answer. on: {grow(run), end(run, ending), missing()}: there is more to show, the
   * answer has ended (once), and the server does not know the model.
   */
  constructor(conversation, view, on) {
    this.conversation = conversation;
    this.view = view;
    this.on = on;
    this.answer = new Answer();
    this.abort = new AbortController();
    this.isOver = false;
    this.isAwaited = false;
    this.drawMs = 0;
  }

  async fetch(body) {
    let ending = null;
    try {
      const isWhole = await this.read(await this.send(body));
      if (!isWhole) ending = { kind: "incomplete", text: "Incomplete: the stream ended before the response did." };
    } catch (error) {
      ending = endingOf(error);
      if (error.status === 404) this.on.missing();
      if (ending === null) {
        this.end({ kind: "failed", text: `This page failed: ${error.message}` });
        throw error;
      }
    }
    this.end(ending);
  }

  send(body) {
    const { signal } = this.abort;
    const onSend = () => (this.answer.startedMs = performance.now());
    const post = (fields) => request("v1/chat/completions", { body: { ...body, ...fields }, signal, onSend });
    return post({}).catch((error) => {
      if (error.param !== "chat_template" || body.chat_template) throw error;
      return post(useChatml());
    });
  }

  read(response) {
    return readEvents(response, (chunk) => {
      if (this.answer.add(chunk, performance.now())) this.growSoon();
    });
  }

  /** Tell of what has come, once for all that comes before the next frame. */
  growSoon() {
    if (this.isAwaited) return;
    this.isAwaited = true;
    const inFrame = () => requestAnimationFrame(() => this.grow());
    if (this.drawMs > 10) setTimeout(inFrame, this.drawMs * DRAWN_SHARE);
    else inFrame();
  }

  grow() {
    this.isAwaited = false;
    if (this.isOver) return;
    const begunMs = performance.now();
    this.on.grow(this);
    this.drawMs = performance.now() - begunMs;
  }

  draw() {
    this.view.update(this.answer.toMessage(), !this.isOver, true);
  }

  /** What has come is kept. */
  stop() {
    this.abort.abort();
    this.end({ kind: "stopped", text: "Stopped." });
  }

  end(ending) {
    if (this.isOver) return;
    this.isOver = true;
    this.answer.ending = ending;
    this.on.end(this, ending);
  }
}

/** null: the error is the page's own. */
function endingOf(error) {
  if (error.name === "AbortError") return { kind: "stopped", text: "Stopped." };
  if (error instanceof ApiError) return { kind: "failed", text: error.words };
  if (error instanceof BrokenConnection) {
    return { kind: "incomplete", text: `Incomplete: the connection broke (${error.message}).` };
  }
  return null;
}
