// The theme's search takes a word that begins with a dash for one to leave out. In these documents such a word is a
// flag, so what the theme reads from the search field has no dashes there.
const written = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value");
for (const field of document.querySelectorAll("[data-md-component=search-query]")) {
  Object.defineProperty(field, "value", {
    get: () => written.get.call(field).replace(/(^|\s)-+(?=\S)/g, "$1"),
    set: (text) => written.set.call(field, text),
  });
}
