// Pages by hash (#/cka), the theme switch, and drawing what becomes visible.
"use strict";

(() => {
  const root = document.documentElement, pages = [...document.querySelectorAll(".page")], started = new Set();
  root.classList.add("js");

  function start(page) {
    if (started.has(page)) return Charts.redraw(false);
    started.add(page);
    for (const element of page.querySelectorAll("[data-explorer]")) new Explorer(element).show();
    for (const element of page.querySelectorAll("[data-viewer]")) new Viewer(element).show();
    for (const element of page.querySelectorAll("[data-pictures] select")) element.addEventListener("change", () => choose(element));
    for (const element of page.querySelectorAll("[data-figure]")) Charts.figure(element);
  }

  // One sheet of pictures, or all of them.
  function choose(select) {
    const sheets = select.closest("[data-pictures]").querySelectorAll(".sheet");
    sheets.forEach((sheet, number) => (sheet.hidden = select.value !== "" && Number(select.value) !== number));
  }

  function open() {
    const wanted = decodeURIComponent(location.hash.replace(/^#\//, ""));
    const page = pages.find((p) => p.dataset.page === wanted) ?? pages[0];
    for (const p of pages) p.classList.toggle("open", p === page);
    for (const link of document.querySelectorAll("nav a")) {
      if (link.dataset.page === page.dataset.page) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    start(page);
  }

  addEventListener("hashchange", () => {
    if (location.hash === "#main") return;
    open();
    scrollTo(0, 0);
    document.getElementById("main").focus({ preventScroll: true });
  });

  const button = document.getElementById("theme");
  const label = () => (button.textContent = Charts.isDark() ? "Light" : "Dark");
  button.addEventListener("click", () => {
    root.dataset.theme = Charts.isDark() ? "light" : "dark";
    label();
    Charts.redraw(true);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (label(), Charts.redraw(true)));

  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => Charts.redraw(false), 150);
  });
  addEventListener("beforeprint", () => pages.forEach(start));

  label();
  open();
})();
