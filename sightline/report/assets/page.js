// Pages by hash (#/cka, #/cka/cka-depth), search, the theme switch, the menu of a small screen, and drawing what becomes visible.
"use strict";

(() => {
  const root = document.documentElement, pages = [...document.querySelectorAll(".page")], started = new Set();
  const side = document.getElementById("side"), menu = document.getElementById("menu");
  root.classList.add("js");

  async function start(page) {
    if (started.has(page)) return Charts.redraw(false);
    started.add(page);
    const data = await Data.of(page.dataset.from ?? page.dataset.page);
    for (const select of page.querySelectorAll("[data-chooses]")) select.addEventListener("change", () => turn(page, select.value));
    for (const element of page.querySelectorAll("[data-pictures] select")) element.addEventListener("change", () => choose(element));
    for (const table of page.querySelectorAll("[data-sortable]")) Tables.sortable(table);
    for (const element of page.querySelectorAll("[data-findings]")) Tables.findings(element);
    if (page.querySelector(".numbers, .multiples")) Overview.start(page, data);
    for (const element of page.querySelectorAll("[data-explorer]")) await new Explorer(element, data.explorer).start();
    for (const element of page.querySelectorAll("[data-viewer]")) await new Viewer(element, data.viewer).show();
    for (const element of page.querySelectorAll("[data-figure]")) {
      if (!data.figures?.[element.dataset.figure]) continue;
      if (element.dataset.late !== undefined) late(element, data);
      else await Charts.figure(element, data.figures[element.dataset.figure]);
    }
  }

  // A figure inside something folded is drawn when that is opened, others when they come near the screen.
  const waiting = new Map(), near = new IntersectionObserver((seen) => seen.forEach((one) => one.isIntersecting && waiting.get(one.target)?.()), { rootMargin: "800px" });
  const idle = window.requestIdleCallback ?? ((act) => setTimeout(act, 200));

  // What is far from the screen is drawn when there is nothing else to do, so that a page can be printed.
  async function rest() {
    const next = [...waiting.keys()].find((element) => element.clientWidth && !folding(element));
    if (next) await waiting.get(next)(), idle(rest);
  }

  const folding = (element) => element.closest("details") ?? element.querySelector(":scope > .fold");

  function late(element, data) {
    const details = folding(element);
    const draw = () => {
      waiting.delete(element);
      near.unobserve(element);
      return Charts.figure(element, data.figures[element.dataset.figure]);
    };
    waiting.set(element, draw);
    if (!details) near.observe(element), idle(rest);
    else if (details.open) draw();
    else details.addEventListener("toggle", () => waiting.get(element)?.(), { once: true });
  }

  // Figures of one choice, such as a measure, are shown at a time.
  function turn(page, choice) {
    for (const figure of page.querySelectorAll("[data-choice]")) figure.hidden = figure.dataset.choice !== choice;
    Charts.redraw(false);
    idle(rest);
  }

  // A figure that is hidden by a choice is chosen.
  function uncover(page, target) {
    const select = target?.hidden && target.dataset.choice !== undefined && page.querySelector("[data-chooses]");
    if (!select) return;
    select.value = target.dataset.choice;
    select.dispatchEvent(new Event("change"));
  }

  // One sheet of pictures, or all of them.
  function choose(select) {
    const sheets = select.closest("[data-pictures]").querySelectorAll(".sheet");
    sheets.forEach((sheet, number) => (sheet.hidden = select.value !== "" && Number(select.value) !== number));
  }

  // scrollIntoView would let the keyboard go on from this link instead of the top of the page.
  function bringIntoView(link) {
    const list = link.closest("nav"), own = link.getBoundingClientRect(), frame = list.getBoundingClientRect();
    list.scrollTop += Math.min(0, own.top - frame.top) + Math.max(0, own.bottom - frame.bottom);
  }

  function open() {
    const [wanted, place] = location.hash.replace(/^#\//, "").split("/").map(decodeURIComponent);
    const page = pages.find((p) => p.dataset.page === wanted) ?? pages[0];
    const all = wanted === "everything", shown = all ? pages : [page];
    root.classList.toggle("everything", all);
    for (const p of pages) p.classList.toggle("open", shown.includes(p));
    for (const link of document.querySelectorAll("nav a")) {
      const current = link.dataset.page === (all ? wanted : page.dataset.page);
      if (current) link.setAttribute("aria-current", "page"), bringIntoView(link);
      else link.removeAttribute("aria-current");
    }
    Encoders.point("");
    const target = place && document.getElementById(place);
    if (target?.tagName === "DETAILS") target.open = true;
    const started = (async () => { for (const p of shown) await start(p); })();
    started.then(() => {
      if (!target || !page.contains(target)) return;
      uncover(page, target);
      target.querySelector(":scope > .fold")?.setAttribute("open", "");
      target.scrollIntoView();
    });
  }

  addEventListener("hashchange", () => {
    if (location.hash === "#main") return;
    fold(true);
    open();
    scrollTo(0, 0);
    document.getElementById("main").focus({ preventScroll: true });
  });

  function fold(closed) {
    side.classList.toggle("unfolded", !closed);
    menu.setAttribute("aria-expanded", String(!closed));
  }
  menu.addEventListener("click", () => fold(side.classList.contains("unfolded")));

  // Search: headings and what stands below them, in all pages; the first words that fit come first.
  const search = document.getElementById("search"), hits = document.getElementById("hits"), most = 12;
  const entries = () =>
    (entries.known ??= pages.flatMap((page) => {
      const title = page.getAttribute("aria-label");
      const own = [...page.querySelectorAll("h1, .lede, figure, .finding, .card h3, .sentences li, .method p, .printed h2, summary")].filter((element) => !element.matches(".table > *, .python > *, .fold > *")).map((element) => {
        const figure = element.tagName === "FIGURE";
        const text = figure ? element.querySelector("h2, h3").textContent : element.textContent.trim().replace(/\s+/g, " ");
        const more = figure ? (element.querySelector("figcaption")?.textContent ?? "") : "";
        const where = element.id ? `#/${page.dataset.page}/${element.id}` : `#/${page.dataset.page}`;
        return { title, text, all: `${title} ${text} ${more}`.toLowerCase(), where, first: element.tagName === "H1" };
      });
      return own;
    }));

  function find() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = words.length ? entries().filter((entry) => words.every((word) => entry.all.includes(word))) : [];
    const told = found.sort((a, b) => b.first - a.first).slice(0, most).map(({ title, text, where, first }) => {
      const item = document.createElement("li"), link = document.createElement("a"), small = document.createElement("span");
      link.href = where;
      link.textContent = text.length > 90 ? `${text.slice(0, 88)}…` : text;
      small.textContent = first ? "" : title;
      link.append(small);
      item.append(link);
      return item;
    });
    if (words.length && !told.length) told.push(Object.assign(document.createElement("li"), { textContent: "Nothing found", className: "soft" }));
    hits.replaceChildren(...told);
    hits.hidden = !words.length;
  }
  search.addEventListener("input", find);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape") (search.value = ""), find();
    if (event.key === "Enter") hits.querySelector("a")?.click();
    if (event.key === "ArrowDown") hits.querySelector("a")?.focus();
  });
  hits.addEventListener("click", () => setTimeout(() => ((search.value = ""), find())));
  addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.closest("input, select, textarea")) return;
    event.preventDefault();
    fold(false);
    search.focus();
  });

  const button = document.getElementById("theme");
  const label = () => (button.textContent = Charts.isDark() ? "Light" : "Dark");
  button.addEventListener("click", () => {
    root.dataset.theme = Charts.isDark() ? "light" : "dark";
    label();
    Charts.redraw(true);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (label(), Charts.redraw(true)));

  let resizing = 0;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => Charts.redraw(false), 150);
  });
  label();
  open();
})();
