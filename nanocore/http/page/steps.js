// The last steps, a bar for each: decode tokens below, prefill tokens above them. The scale is of
// square roots, for a few decode tokens are to be seen beside a chunk of a thousand. A bar is chosen
// by pointing or by arrow keys, and its numbers are told.
import { count, duration, svg } from "./dom.js";

const HEIGHT = 190;
const TOP = 14;
const BOTTOM = 22;
const LEFT = 44;
const MAX_PITCH = 9; // from one bar to the next
const MIN_PITCH = 4; // with less, patterns are not seen
const PLOT = HEIGHT - TOP - BOTTOM;

export class StepChart {
  /** element: a slider; detail: where the chosen step's numbers go. */
  constructor(element, detail) {
    this.element = element;
    this.detail = detail;
    this.hint = detail.textContent;
    this.steps = [];
    this.about = null;
    this.chosen = null; // a step's number; null: none
    new ResizeObserver(() => this.draw()).observe(element);
    element.addEventListener("pointermove", (event) => this.point(event));
    element.addEventListener("pointerdown", (event) => this.point(event));
    element.addEventListener("keydown", (event) => this.press(event));
  }

  forget() {
    this.chosen = null;
    this.steps = [];
    this.detail.textContent = this.hint;
    this.draw();
  }

  /** about: the answer that they came with. */
  show(steps, about) {
    this.steps = steps;
    this.about = about;
    this.draw();
    this.tell();
  }

  /** As many of the last steps as there is room for. */
  get seen() {
    return this.steps.slice(-Math.max(1, Math.floor(this.room / MIN_PITCH)));
  }

  get room() {
    return this.element.clientWidth - LEFT;
  }

  get pitch() {
    return Math.min(MAX_PITCH, Math.max(MIN_PITCH, this.room / this.seen.length));
  }

  choose(place) {
    const { seen } = this;
    if (!seen.length) return;
    const { step } = seen[Math.min(Math.max(place, 0), seen.length - 1)];
    if (step === this.chosen) return;
    this.chosen = step;
    this.draw();
    this.tell();
  }

  point(event) {
    const x = event.clientX - this.element.getBoundingClientRect().left - LEFT;
    if (x >= 0) this.choose(Math.floor(x / this.pitch));
  }

  press(event) {
    const { seen } = this;
    const at = seen.findIndex(({ step }) => step === this.chosen);
    const from = at < 0 ? seen.length : at;
    const places = {
      ArrowLeft: from - 1,
      ArrowDown: from - 1,
      ArrowRight: at < 0 ? seen.length - 1 : at + 1,
      ArrowUp: at < 0 ? seen.length - 1 : at + 1,
      PageUp: from - 10,
      PageDown: at < 0 ? seen.length - 1 : at + 10,
      Home: 0,
      End: seen.length - 1,
    };
    if (!(event.key in places)) return;
    event.preventDefault();
    this.choose(places[event.key]);
  }

  draw() {
    const { seen, pitch } = this;
    const most = Math.max(1, ...seen.map((step) => step.decode_tokens + step.prefill_tokens));
    const top = rounded(most);
    const width = Math.max(this.element.clientWidth, 1);
    const parts = [0, top / 16, top / 4, top].map((tokens) => axisLine(tokens, top, width));
    seen.forEach((step, place) => {
      parts.push(...bar(step, LEFT + place * pitch, pitch, top, step.step === this.chosen));
    });
    if (seen.length) parts.push(...ages(seen, this.about.now_s, pitch));
    const chart = svg("svg", { width, height: HEIGHT, "aria-hidden": "true" }, ...parts);
    this.element.replaceChildren(chart);
  }

  tell() {
    const step = this.seen.find((one) => one.step === this.chosen);
    const { element } = this;
    element.setAttribute("aria-valuemin", this.seen[0]?.step ?? 0);
    element.setAttribute("aria-valuemax", this.seen.at(-1)?.step ?? 0);
    element.setAttribute("aria-valuenow", step?.step ?? this.seen.at(-1)?.step ?? 0);
    const text = step ? words(step, this.about) : null;
    element.setAttribute("aria-valuetext", text ?? `${this.steps.length} steps, none is chosen`);
    this.detail.textContent = text ?? this.hint;
  }
}

function words(step, { now_s, num_blocks }) {
  const preempted = step.preempted ? `, ${count(step.preempted)} preempted` : "";
  return (
    `Step ${count(step.step)}, ${duration(Math.max(0, now_s - step.t_s))} ago, took ${duration(step.duration_s)}: ` +
    `${count(step.decode_tokens)} decode and ${count(step.prefill_tokens)} prefill tokens; ` +
    `${count(step.running)} running, ${count(step.waiting)} waiting${preempted}; ` +
    `${count(step.used_blocks)} of ${count(num_blocks)} blocks in use`
  );
}

/** The next of 16 times 1, 2, 4 and so on: its quarter and its sixteenth are whole. */
function rounded(number) {
  let top = 16;
  while (top < number) top *= 2;
  return top;
}

function high(tokens, top) {
  return PLOT * Math.sqrt(tokens / top);
}

function axisLine(tokens, top, width) {
  const y = TOP + PLOT - high(tokens, top) + 0.5;
  return svg(
    "g",
    {},
    svg("line", { class: "grid", x1: LEFT - 4, x2: width, y1: y, y2: y }),
    svg("text", { class: "tick", x: LEFT - 8, y: y + 4, "text-anchor": "end", text: count(tokens) }),
  );
}

function bar(step, x, pitch, top, isChosen) {
  const wide = pitch * 0.78;
  const decode = high(step.decode_tokens, top);
  const prefill = high(step.decode_tokens + step.prefill_tokens, top) - decode;
  const floor = TOP + PLOT;
  const part = (kind, y, height) => svg("rect", { class: kind, x, y, width: wide, height });
  const found = [];
  if (isChosen) found.push(svg("rect", { class: "chosen", x: x - 2, y: TOP - 6, width: wide + 4, height: PLOT + 12 }));
  if (decode) found.push(part("decode", floor - decode, decode));
  if (prefill) found.push(part("prefill", floor - decode - prefill, prefill));
  if (step.preempted) found.push(svg("circle", { class: "preempted-dot", cx: x + wide / 2, cy: TOP - 7, r: 3.5 }));
  return found;
}

/** How long ago the first and the last step were. */
function ages(seen, nowS, pitch) {
  const end = LEFT + seen.length * pitch;
  const label = (step) => `${duration(Math.max(0, nowS - step.t_s))} ago`;
  const y = HEIGHT - 5;
  const found = [svg("text", { class: "tick", x: LEFT, y, text: label(seen[0]) })];
  if (end - LEFT > 200) {
    found.push(svg("text", { class: "tick", x: end, y, "text-anchor": "end", text: label(seen.at(-1)) }));
  }
  return found;
}
