// Each request's way as a bar in time, with its phases' times in words beside it.
import { byId, count, duration, el, svg } from "./dom.js";

const MAX_ROWS = 24;
const HEIGHT = 16;
const PHASES = ["queued", "prefill", "decode", "preempted"];

/**
 * Show an answer's requests over the last `windowS` seconds; the open ones in
 * the order of their coming, then the others, the last to end first.
 */
export function showWays({ requests, now_s: nowS }, windowS) {
  const known = requests.map((request) => spansOf(request, nowS));
  const seen = known
    .filter(({ endS, isOpen }) => isOpen || endS > nowS - windowS)
    .sort((a, b) => b.isOpen - a.isOpen || (a.isOpen ? a.startS - b.startS : b.endS - a.endS));
  byId("window-start").textContent = `${windowS} s ago`;
  const list = byId("ways");
  list.replaceChildren(...seen.slice(0, MAX_ROWS).map((one) => row(one, nowS, windowS)));
  for (const place of list.querySelectorAll(".way")) draw(place, place.clientWidth, windowS);
  const hidden = seen.length - MAX_ROWS;
  const note = byId("no-ways");
  note.hidden = seen.length > 0 && hidden <= 0;
  note.textContent = hidden > 0 ? `and ${count(hidden)} more` : `No requests in the last ${windowS} s.`;
}

/** A request with its phases as [phase, from, to], the last of an open one up to now. */
function spansOf(request, nowS) {
  const spans = [];
  request.way.forEach(([phase, sinceS], place) => {
    if (phase === "ended") return;
    const next = request.way[place + 1];
    spans.push([phase, sinceS, next ? next[1] : Math.max(nowS, sinceS)]);
  });
  const isOpen = request.way.at(-1)?.[0] !== "ended";
  const startS = request.way[0]?.[1] ?? nowS;
  const endS = isOpen ? nowS : request.way.at(-1)[1];
  return { request, spans, isOpen, startS, endS };
}

function row({ request, spans, isOpen }, nowS, windowS) {
  const state = isOpen ? spans.at(-1)?.[0] ?? "queued" : `ended: ${request.finish_reason ?? "?"}`;
  const name = request.id ?? `request ${request.handle}`;
  const cached = request.cached_tokens ? ` (${count(request.cached_tokens)} cached)` : "";
  const output = request.output_tokens === null ? "" : `, ${count(request.output_tokens)} out`;
  const place = el("div", { class: "way", "aria-hidden": "true" });
  place.spans = spans.map(([phase, from, to]) => [phase, from - (nowS - windowS), to - (nowS - windowS)]);
  return el(
    "li",
    {},
    el(
      "p",
      { class: "who" },
      el("span", { class: "name", text: name, title: name }),
      el("span", { class: `phase ${isOpen ? state : "ended"}`, text: state }),
    ),
    place,
    el("p", { class: "detail", text: `${count(request.prompt_tokens)} prompt tokens${cached}${output}. ${times(spans)}` }),
  );
}

function times(spans) {
  const sums = new Map();
  for (const [phase, from, to] of spans) sums.set(phase, (sums.get(phase) ?? 0) + to - from);
  const known = PHASES.filter((phase) => sums.has(phase));
  return known.map((phase) => `${phase} ${duration(sums.get(phase))}`).join(", ");
}

function draw(place, width, windowS) {
  const parts = [];
  for (const [phase, from, to] of place.spans) {
    if (to <= 0 || !PHASES.includes(phase)) continue;
    const x = (Math.max(0, from) / windowS) * width;
    const end = (to / windowS) * width;
    const shown = { x, y: 1, width: Math.max(2, end - x), height: HEIGHT - 2 };
    parts.push(svg("rect", { class: phase, ...shown }));
  }
  place.replaceChildren(svg("svg", { width, height: HEIGHT }, ...parts));
}
