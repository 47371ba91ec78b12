// The settings' form: what a request has beside its messages. Empty fields are not sent.
import { byId, el } from "./dom.js";
import { loadSettings, saveSettings } from "./store.js";

// [name of the field, label, step, least, most, what it does]; the server has the last word on ranges.
const NUMBERS = [
  ["temperature", "Temperature", "any", 0, null, "Higher is more varied; 0 always takes the most likely token"],
  ["top_p", "Top p", "any", 0, 1, "Chooses among the most likely tokens that together have this probability"],
  ["top_k", "Top k", 1, -1, null, "Chooses among this many of the most likely tokens; -1: all"],
  ["min_p", "Min p", "any", 0, 1, "Leaves out tokens less likely than this share of the most likely one"],
  ["max_tokens", "Max tokens", 1, 1, null, "The response ends after this many tokens; a token is about 3/4 of a word"],
  ["seed", "Seed", 1, null, null, "The same seed gives the same response again"],
  ["presence_penalty", "Presence penalty", "any", -2, 2, "Above 0, tokens that were used are less likely"],
  ["frequency_penalty", "Frequency penalty", "any", -2, 2, "Above 0, tokens are less likely the more often they were used"],
  ["repetition_penalty", "Repetition penalty", "any", 0, null, "Above 1, tokens of the conversation so far are less likely"],
];

// Sent where the model recommends nothing; `nanocore chat` has the same.
const DEFAULTS = { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, max_tokens: 2048 };
let modelName = "";
let recommended = null; // null: the server does not say, and its defaults apply
let template = {};

/** A field that is no such thing: its element, and why. */
export class SettingError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** Make the form, with what was kept. */
export function startSettings() {
  byId("number-settings").append(...NUMBERS.map(numberField));
  const form = byId("settings-form");
  const kept = loadSettings();
  for (const field of fields()) field.value = kept[field.name] ?? "";
  showToolsError();
  showInForce();
  form.addEventListener("input", () => {
    saveSettings(Object.fromEntries(fields().map((field) => [field.name, field.value])));
    showToolsError();
    showInForce();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("reset-settings").addEventListener("click", () => {
    form.reset();
    for (const field of fields()) field.value = "";
    saveSettings({});
    showToolsError();
    showInForce();
  });
}

/** The model that is served, and what it recommends, as /v1/models has it. */
export function setServed(name, sampling) {
  modelName = name;
  recommended = typeof sampling === "object" ? sampling : null;
  template = {};
  for (const [name] of NUMBERS) byId(`set-${name}`).placeholder = defaults()[name] ?? "default";
  showInForce();
}

/** Use ChatML from now on, as the model has no chat template: the fields that say so. */
export function useChatml() {
  template = { chat_template: "chatml" };
  showInForce();
  return template;
}

const recommendsNothing = () => recommended !== null && !Object.keys(recommended).length;

function defaults() {
  return recommendsNothing() ? DEFAULTS : (recommended ?? {});
}

/** What the next request gets, and where it is from. */
function showInForce() {
  const isSet = ([name]) => byId(`set-${name}`).value !== "";
  const given = NUMBERS.filter(isSet).map(([name]) => `${plainName(name)} ${byId(`set-${name}`).value}`);
  if (systemPrompt()) given.push("a system prompt");
  if (byId("set-stop").value.trim()) given.push("stop strings");
  if (byId("set-tools").value.trim()) given.push("tools");
  const others = NUMBERS.filter((number) => !isSet(number) && number[0] in defaults());
  const source = recommendsNothing() ? "Defaults, as the model recommends none" : "Recommended by the model";
  const parts = modelName ? [`Model: ${modelName}.`] : [];
  if (given.length) parts.push(`Set: ${given.join(", ")}.`);
  if (others.length) {
    parts.push(`${source}: ${others.map(([name]) => `${plainName(name)} ${defaults()[name]}`).join(", ")}.`);
  }
  if (template.chat_template) parts.push("The model has no chat template: ChatML is used, and may not suit it.");
  byId("in-force").textContent = parts.join(" ");
}

const plainName = (name) => name.replaceAll("_", " ");

function numberField([name, label, step, min, max, title]) {
  const id = `set-${name}`;
  const input = el("input", { id, name, type: "number", step, min, max, title, placeholder: "default" });
  return el("div", { title }, el("label", { for: id, text: label }), input);
}

function fields() {
  return [...byId("settings-form").elements].filter((field) => field.name);
}

function showToolsError() {
  let text = "";
  try {
    tools();
  } catch (error) {
    text = error.message;
  }
  byId("set-tools-error").textContent = text;
  byId("set-tools").setAttribute("aria-invalid", String(text !== ""));
}

function tools() {
  const field = byId("set-tools");
  if (!field.value.trim()) return null;
  let value;
  try {
    value = JSON.parse(field.value);
  } catch (error) {
    throw new SettingError(field, `Tools are not valid JSON: ${error.message}`);
  }
  if (!Array.isArray(value)) throw new SettingError(field, "Tools must be a JSON array.");
  return value.length ? value : null;
}

/** The system prompt; empty: none. */
export const systemPrompt = () => byId("set-system").value;

/** The fields of a request that the form has. Raises SettingError. */
export function requestFields() {
  const found = { ...template, ...(recommendsNothing() ? DEFAULTS : {}) };
  for (const [name, label] of NUMBERS) {
    const field = byId(`set-${name}`);
    if (!field.validity.valid) throw new SettingError(field, `${label}: ${field.validationMessage}`);
    // As it is written: a seed may have more digits than a JavaScript number holds exactly.
    if (field.value !== "") found[name] = JSON.rawJSON ? JSON.rawJSON(plain(field.value)) : Number(field.value);
  }
  const stop = byId("set-stop").value.split("\n").filter((line) => line !== "");
  if (stop.length) found.stop = stop;
  const known = tools();
  if (known !== null) found.tools = known;
  return found;
}

/** A number as JSON has them: "+.5e3", "007" and "1." are none there. */
function plain(text) {
  return /^-?(0|[1-9]\d*)$/.test(text) ? text : String(Number(text));
}
