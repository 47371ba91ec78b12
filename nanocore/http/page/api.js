// Requests to the server that this page came from: keys, errors in its words, streams of events.
// Addresses are relative to this file's, so the page works behind a proxy's path, too.
import { byId } from "./dom.js";

const BASE = new URL("..", import.meta.url);
const KEY = "nanocore.key";
const MAX_KEY_CHARS = 8192; // a server takes 64 KiB of headers, a proxy before it less
const MAX_REASON_CHARS = 500;
const VISIBLE_ASCII = /^[\x21-\x7e]+$/; // what a header can carry

/** What the server, or the way to it, says instead of an answer. status: 0 if nothing came. */
export class ApiError extends Error {
  constructor(message, status, retryAfterS = null, param = null) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
    this.param = param; // the field at fault
  }

  /** For people: with the status, and when to come back. */
  get words() {
    const status = this.status ? `${this.status}: ` : "";
    const when = this.retryAfterS === 0 ? "now" : `in ${this.retryAfterS} s`;
    const later = this.retryAfterS === null ? "" : ` (try again ${when})`;
    return `${status}${this.message}${later}`;
  }

  /** Whether another key may help: 403 and 431 are a key's fault only where one was sent. */
  get wantsKey() {
    return this.status === 401 || ([403, 431].includes(this.status) && hasKey());
  }
}

/** The connection broke while an answer came. */
export class BrokenConnection extends Error {}

/**
 * The answer to a request that succeeds. Raises ApiError, or AbortError if signal says so.
 * onSend: called whenever it is sent, which is again with another key.
 */
export async function request(path, { body, signal, onSend } = {}) {
  for (;;) {
    const used = keptKey();
    onSend?.();
    const response = await send(path, body, signal, used);
    if (response.ok) return response;
    const error = await errorOf(response);
    if (error.status === 401 && used !== null) error.message = "Wrong key";
    if (!error.wantsKey || !(await newKey(used, error.message))) throw error;
    signal?.throwIfAborted();
  }
}

/** The same, of an answer that is a JSON object. */
export async function requestJson(path, options) {
  const response = await request(path, options);
  let body = null;
  try {
    body = await response.json();
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw new ApiError("the answer broke off", 0);
  }
  if (typeof body === "object" && body !== null) return body;
  throw new ApiError(`the answer is no JSON object (${typeOf(response)})`, response.status);
}

function typeOf(response) {
  return response.headers.get("content-type")?.split(";")[0].toLowerCase() || "of no type";
}

async function send(path, body, signal, key) {
  const headers = {};
  if (key !== null) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  try {
    return await fetch(new URL(path, BASE), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server does not answer", 0);
  }
}

async function errorOf(response) {
  const text = await response.text().catch(() => "");
  let message = text.slice(0, MAX_REASON_CHARS) || response.statusText || "no reason is given";
  let param = null;
  try {
    const body = JSON.parse(text);
    message = messageOf(body) ?? message;
    param = body?.error?.param;
  } catch {
    // no JSON, as from a proxy: its text stands
  }
  return new ApiError(message, response.status, retryAfterS(response.headers), param);
}

/** Retry-After, which is seconds or a date by the server's clock; null: it says neither. */
function retryAfterS(headers) {
  const text = headers.get("retry-after")?.trim() ?? "";
  if (/^\d+$/.test(text)) return Number(text);
  const untilMs = /^[A-Za-z]/.test(text) ? Date.parse(text) : NaN;
  const nowMs = Date.parse(headers.get("date") ?? "") || Date.now();
  return Number.isNaN(untilMs) ? null : Math.max(0, Math.ceil((untilMs - nowMs) / 1000));
}

/** What an error says, also where it is not as OpenAI's are; null: it is none. */
function messageOf(body) {
  const error = body?.error ?? null;
  if (error === null) return null;
  const message = error.message ?? error;
  return typeof message === "string" ? message : JSON.stringify(message).slice(0, MAX_REASON_CHARS);
}

// -- keys -----------------------------------------------------------------------------------------

/** Has an event "given" whenever there is another key. */
export const keyEvents = new EventTarget();

let asking = null;
let unkeptKey = null; // where the browser refuses storage

export const hasKey = () => keptKey() !== null;

function keptKey() {
  try {
    return sessionStorage.getItem(KEY) ?? unkeptKey;
  } catch {
    return unkeptKey;
  }
}

/** key: null to forget the one there is. */
function keepKey(key) {
  unkeptKey = key;
  try {
    if (key === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, key);
  } catch {
    // it lasts as long as the page, then
  }
  if (key !== null) keyEvents.dispatchEvent(new Event("given"));
}

function whyNoKey(key) {
  if (key.length > MAX_KEY_CHARS) return `A key has at most ${MAX_KEY_CHARS} characters; this one has ${key.length}.`;
  return VISIBLE_ASCII.test(key) ? null : "A key has only printable ASCII characters.";
}

/** Whether there is another key than `used` to try; all requests that need one ask once. */
async function newKey(used, reason) {
  return keptKey() !== used || askForKey(used === null ? "" : reason);
}

/** Ask for a key, unless that is being done. True if one was given. */
export function askForKey(reason) {
  asking ??= showKeyDialog(reason).finally(() => (asking = null));
  return asking;
}

function showKeyDialog(reason) {
  const dialog = byId("key-dialog");
  const input = byId("key");
  byId("key-reason").textContent = reason;
  byId("change-key").hidden = false;
  byId("key-forget").hidden = !hasKey();
  input.value = "";
  return new Promise((resolve) => {
    const done = new AbortController();
    const { signal } = done;
    byId("key-cancel").addEventListener("click", () => dialog.close(""), { signal });
    const forget = () => {
      keepKey(null);
      dialog.close("");
    };
    byId("key-forget").addEventListener("click", forget, { signal });
    byId("key-form").addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        const key = input.value.trim();
        const why = whyNoKey(key);
        byId("key-reason").textContent = why ?? "";
        if (why !== null) return;
        keepKey(key);
        dialog.close("given");
      },
      { signal },
    );
    dialog.addEventListener(
      "close",
      () => {
        done.abort();
        input.value = "";
        resolve(dialog.returnValue === "given");
      },
      { signal },
    );
    dialog.returnValue = "";
    dialog.showModal();
  });
}

// -- streams --------------------------------------------------------------------------------------

/** Read an answer's server-sent events, each of JSON. True if [DONE] ended them. */
export async function readEvents(response, onEvent) {
  if (typeOf(response) !== "text/event-stream") {
    response.body?.cancel().catch(() => {});
    throw new ApiError(`the answer is no stream of events (${typeOf(response)})`, response.status);
  }
  const reader = response.body.getReader(); // nothing in between, where a broken one would lose more
  try {
    return await eachEvent(reader, onEvent);
  } finally {
    reader.cancel().catch(() => {}); // nothing more is wanted of it, and it may be broken
  }
}

async function eachEvent(reader, onEvent) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(broken);
    const text = done ? "\n" : decoder.decode(value, { stream: true });
    const lines = (rest + text).split(/\r\n|\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // a comment keeps the connection alive
      const data = line.slice(5).trim();
      if (data === "[DONE]") return true;
      const event = parsed(data);
      const message = messageOf(event);
      if (message !== null) throw new ApiError(message, 0);
      onEvent(event);
    }
    if (done) return false;
  }
}

function broken(error) {
  throw error.name === "AbortError" ? error : new BrokenConnection(error.message);
}

function parsed(data) {
  let event = null;
  try {
    event = JSON.parse(data);
  } catch {
    // as one that is no object
  }
  if (typeof event !== "object" || event === null) {
    throw new ApiError("the answer is broken: an event of it is no JSON object", 0);
  }
  return event;
}
