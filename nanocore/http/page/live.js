// The live view: asks /live once a second while it is seen, and shows what came.
//
// The engine's clock is the only one: ages and rates come from its times, so the browser's need not
// agree. Another engine's numbers begin anew.
import { ApiError, requestJson } from "./api.js";
import { byId, count, el } from "./dom.js";
import { StepChart } from "./steps.js";
import { showWays } from "./ways.js";

const INTERVAL_MS = 1000;
const TIMEOUT_MS = 10_000;
const MAX_STEPS = 512;
const RATE_SAMPLES = 5; // a rate is over so many answers, some seconds
const TILES = [
  ["running", "Running", "Requests that get tokens now"],
  ["waiting", "Waiting", "Requests in the queue"],
  ["kv", "KV cache", "Share of the memory for conversations' tokens that is in use"],
  ["hits", "Prefix hits", "Share of prompt tokens that were computed before, for an earlier request"],
  ["output", "Output tokens/s", "Tokens of responses"],
  ["prompt", "Prompt tokens/s", "Tokens of prompts, those that were computed before included"],
  ["preemptions", "Preemptions", "How often a running request had to wait again, as the KV cache was full"],
];

export class LiveView {
  constructor() {
    this.isShown = false;
    this.isPaused = false;
    this.wantsKey = false; // for that reason alone it is paused
    this.timer = null;
    this.asking = null;
    this.values = {};
    this.replacedAt = null;
    this.chart = new StepChart(byId("steps"), byId("step-detail"));
    this.forget();
    byId("tiles").append(...TILES.map((tile) => this.tile(tile)));
    byId("pause").addEventListener("click", () => this.setPaused(!this.isPaused));
    byId("window").addEventListener("change", () => this.showWays());
    new ResizeObserver(() => this.fitWays()).observe(byId("ways"));
    document.addEventListener("visibilitychange", () => this.wake());
  }

  forget() {
    this.engine = null;
    this.steps = [];
    this.samples = [];
    this.last = null;
    this.waysWidth = 0;
  }

  tile([name, label, title]) {
    const value = el("dd", { text: "–", id: `tile-${name}` });
    this.values[name] = value;
    const bar = name === "kv" || name === "hits" ? el("span", { class: "meter", "aria-hidden": "true" }, el("i")) : null;
    return el("div", { class: "tile", title }, el("dt", { text: label }), value, bar);
  }

  setShown(isShown) {
    this.isShown = isShown;
    this.wake();
  }

  setPaused(isPaused) {
    this.isPaused = isPaused;
    this.wantsKey = false;
    byId("pause").setAttribute("aria-pressed", String(isPaused));
    if (isPaused) this.say("paused", "Paused");
    this.wake();
  }

  /** There is another key. */
  takeKey() {
    if (this.wantsKey) this.setPaused(false);
  }

  /** Ask now, and go on; or ask no more. */
  wake() {
    clearTimeout(this.timer);
    if (!this.isShown || this.isPaused || document.visibilityState !== "visible") return;
    this.asking ??= this.ask().finally(() => {
      this.asking = null;
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.wake(), INTERVAL_MS);
    });
  }

  async ask() {
    const after = this.steps.at(-1)?.step ?? 0;
    try {
      const signal = AbortSignal.timeout(TIMEOUT_MS);
      const body = await requestJson(`live?after=${after}`, { signal });
      if (!this.isPaused) this.take(body);
    } catch (error) {
      this.fail(error);
    }
  }

  fail(error) {
    const isAnswer = error instanceof ApiError && error.status !== 0;
    const words = error.words ?? error.message;
    if (error.wantsKey) {
      this.setPaused(true); // who gives no key is not asked each second
      this.wantsKey = true;
    }
    this.say("gone", isAnswer && error.status !== 503 ? words : `The engine is gone: ${words}`);
  }

  take(body) {
    const isOther = this.engine !== null && body.engine !== this.engine;
    if (isOther) {
      this.forget();
      this.chart.forget();
    }
    this.engine = body.engine;
    if (isOther) {
      this.replacedAt = new Date().toLocaleTimeString();
      this.say("replaced", this.liveWords());
      return; // `after` was of the old one's steps: the next answer has all
    }
    const newest = this.steps.at(-1)?.step ?? 0;
    this.steps.push(...body.steps.filter((step) => step.step > newest));
    this.steps.splice(0, this.steps.length - MAX_STEPS);
    this.samples.push(body);
    this.samples.splice(0, this.samples.length - RATE_SAMPLES);
    this.last = body;
    if (body.draining) this.say("draining", "The engine is draining: it finishes its requests");
    else this.say("", this.liveWords());
    this.showTiles(body);
    this.chart.show(this.steps, body);
    this.showWays();
  }

  liveWords() {
    return this.replacedAt ? `Live; the engine was replaced at ${this.replacedAt}` : "Live";
  }

  showTiles({ stats }) {
    const hits = stats.prefix_cache_queries ? stats.prefix_cache_hits / stats.prefix_cache_queries : null;
    this.set("running", count(stats.num_requests_running));
    this.set("waiting", count(stats.num_requests_waiting));
    this.set("kv", share(stats.kv_cache_usage_perc), stats.kv_cache_usage_perc);
    this.set("hits", share(hits), hits);
    this.set("output", rate(this.samples, "generation_tokens"));
    this.set("prompt", rate(this.samples, "prompt_tokens"));
    this.set("preemptions", count(stats.num_preemptions));
  }

  set(name, text, part = null) {
    this.values[name].textContent = text;
    const meter = this.values[name].parentElement.querySelector("i");
    if (meter) meter.style.width = `${100 * Math.min(part ?? 0, 1)}%`;
  }

  /** Rows make the list higher; only another width is a reason to draw them again. */
  fitWays() {
    const width = byId("ways").clientWidth;
    if (width !== this.waysWidth) this.showWays();
    this.waysWidth = width;
  }

  showWays() {
    if (this.last) showWays(this.last, Number(byId("window").value));
  }

  say(kind, text) {
    const state = byId("live-state");
    state.dataset.kind = kind;
    if (state.textContent !== text) state.textContent = text;
  }
}

function share(part) {
  if (part === null) return "–";
  return `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %`;
}

/** How fast a counter grew over the samples. */
function rate(samples, counter) {
  const [first, last] = [samples[0], samples.at(-1)];
  const seconds = last.now_s - first.now_s;
  return seconds > 0 ? count((last.stats[counter] - first.stats[counter]) / seconds) : "–";
}
