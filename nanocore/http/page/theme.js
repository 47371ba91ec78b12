// Sets the chosen theme before anything is drawn; app.js offers the choice.
// "auto", or nothing kept: as the system has it. Storage may be refused: then it is auto, too.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("nanocore.theme");
  } catch {
    return;
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
