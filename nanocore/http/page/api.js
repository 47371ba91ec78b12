// Requests to the server that this page came from: keys, errors in its words, streams of events.
// Addresses are relative to this file's, so the page works behind a proxy's path, too.
import { byId } from "./dom.js";

const BASE = new URL("..", import.meta.url);
const KEY = "nanocore.key";
const VISIBLE_ASCII = /^[\x21-\x7e]+$/; // what a header can carry

/** What the server, or the way to it, says instead of an answer. status: 0 if nothing came. */
export class ApiError extends Error {
  constructor(message, status, retryAfterS = null) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }

  /** For people: with the status, and when to come back. */
  get words() {
    const status = this.status ? `${this.status}: ` : "";
    const later = this.retryAfterS === null ? "" : ` (try again in ${this.retryAfterS} s)`;
    return `${status}${this.message}${later}`;
  }
}

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
    if (response.status !== 401 || !(await newKey(used, error.message))) throw error;
    signal?.throwIfAborted();
  }
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
  let message = text.slice(0, 500) || response.statusText || "no reason is given";
  try {
    message = messageOf(JSON.parse(text)) ?? message;
  } catch {
    // no JSON, as from a proxy: its text stands
  }
  const retry = response.headers.get("retry-after");
  return new ApiError(message, response.status, retry === null ? null : Number(retry));
}

function messageOf(body) {
  return typeof body?.error?.message === "string" ? body.error.message : null;
}

// -- keys -----------------------------------------------------------------------------------------

let asking = null;
let unkeptKey = null; // where the browser refuses storage

function keptKey() {
  try {
    return sessionStorage.getItem(KEY) ?? unkeptKey;
  } catch {
    return unkeptKey;
  }
}

function keepKey(key) {
  unkeptKey = key;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // it lasts as long as the page, then
  }
}

/** Whether there is another key than `used` to try; all requests that need one ask once. */
async function newKey(used, reason) {
  if (keptKey() !== used) return true;
  asking ??= askForKey(used === null ? "" : reason).finally(() => (asking = null));
  return asking;
}

/** Ask for a key. True if one was given. */
export function askForKey(reason) {
  const dialog = byId("key-dialog");
  const input = byId("key");
  byId("key-reason").textContent = reason;
  byId("change-key").hidden = false;
  input.value = "";
  return new Promise((resolve) => {
    const done = new AbortController();
    const { signal } = done;
    byId("key-cancel").addEventListener("click", () => dialog.close(""), { signal });
    byId("key-form").addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        const key = input.value.trim();
        if (VISIBLE_ASCII.test(key)) {
          keepKey(key);
          dialog.close("given");
        } else byId("key-reason").textContent = "A key has letters, digits and signs of ASCII alone.";
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
    const { done, value } = await reader.read();
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

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError("the answer is broken: an event of it is no JSON", 0);
  }
}
