// Before the first paint: the theme chosen here, or the system's.
(function () {
  var chosen = null;
  try {
    chosen = localStorage.getItem("shardyard.theme");
  } catch (refused) {
    // Storage is off in this browser: follow the system.
  }
  var dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
