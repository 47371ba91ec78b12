// Elements, built without markup: text is always a text node, whatever is in it.

/** The element with this id, which index.html has. */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`index.html has no #${id}`);
  return found;
}

/** An element. properties: `class`, `text`, `on` (listeners by event), or an attribute's name. */
export function el(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

/** The same, of SVG. */
export function svg(tag, properties = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A button that is no form's submit. */
export function button(text, onClick, properties = {}) {
  return el("button", { type: "button", text, on: { click: onClick }, ...properties });
}

const SPOKEN_MS = 5000;
let silence = 0;

/** Say something to who listens to the page, once: it is not left there to be read again. */
export function announce(text) {
  const announcer = byId("announcer");
  announcer.textContent = text;
  clearTimeout(silence);
  silence = setTimeout(() => (announcer.textContent = ""), SPOKEN_MS);
}

/** Let a text field be as high as its text; the style sheet says how high at most. */
export function fit(textarea) {
  textarea.style.height = "auto";
  textarea.style.height = `${textarea.scrollHeight + 2}px`;
}

/** Copy a text, and say so on the button; where the browser forbids it, select what holds it. */
export async function copy(text, source, copyButton) {
  const label = copyButton.textContent;
  try {
    await navigator.clipboard.writeText(text);
    copyButton.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(source);
    copyButton.textContent = "Selected: copy it";
  }
  setTimeout(() => (copyButton.textContent = label), 1500);
}

const numberFormat = new Intl.NumberFormat("en");

/** 12,345 */
export function count(number) {
  return numberFormat.format(Math.round(number));
}

/** A time in the unit that suits it. */
export function duration(seconds) {
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  return `${count(seconds)} s`;
}
