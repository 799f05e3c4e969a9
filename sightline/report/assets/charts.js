// Draws the charts of the page: data, theme, size, tooltip, downloads. Everything that comes from users is set as text, never as HTML.
"use strict";

const Charts = (() => {
  const report = JSON.parse(document.getElementById("report-data").textContent);
  const drawn = new Map(); // element -> function that draws it again
  const MANY = 4000; // marks; above this a canvas is quicker than an SVG tree

  const isDark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };

  // Tables travel as columns; a column of repeated words as {words, codes}.
  const column = (packed) => (Array.isArray(packed) ? packed : packed.codes.map((code) => packed.words[code]));

  function rows(table) {
    const names = table.names, columns = table.columns.map(column);
    return Array.from({ length: table.rows }, (_, i) => Object.fromEntries(names.map((name, k) => [name, columns[k][i]])));
  }

  // Puts values in place of the strings "@name"; a list that holds only "@name" becomes the list given.
  function fill(spec, values) {
    if (typeof spec === "string") return Object.hasOwn(values, spec) ? values[spec] : spec;
    if (Array.isArray(spec)) {
      const whole = spec.length === 1 && typeof spec[0] === "string" && Object.hasOwn(values, spec[0]) && values[spec[0]];
      return Array.isArray(whole) ? whole : spec.map((part) => fill(part, values));
    }
    if (spec && typeof spec === "object") return Object.fromEntries(Object.entries(spec).map(([k, v]) => [k, fill(v, values)]));
    return spec;
  }

  // Gives a chart of a known shape the width there is; others are scaled down by the style sheet.
  function fit(spec, width) {
    const shape = spec.usermeta?.shape;
    if (!shape) return spec;
    spec = structuredClone(spec);
    if (spec.facet) {
      const square = shape === "heatmap";
      const side = square ? (width < 500 ? 100 : 150) : 270, around = square ? 64 : 30, edge = square ? 12 : 60;
      const panels = new Set(Object.values(spec.datasets).flat().map((row) => row[spec.facet.field])).size;
      const across = Math.max(1, Math.min(panels, Math.floor((width - edge) / (side + around))));
      const each = Math.min((width - edge) / across - around, square ? 230 : 520);
      spec.columns = across;
      spec.facet.header = { ...spec.facet.header, labelLimit: Math.floor(each + around - 12) };
      spec.spec.width = Math.floor(each);
      spec.spec.height = Math.floor(square ? each : Math.max(170, each * 0.62));
    } else if (shape === "curve") {
      spec.width = Math.floor(Math.min(width - 70, 680));
      spec.height = Math.floor(Math.max(190, Math.min(300, spec.width * 0.6)));
    }
    return spec;
  }

  const tip = document.getElementById("tip");

  function showTip(event, value) {
    tip.replaceChildren();
    if (value && typeof value === "object") {
      const list = document.createElement("dl");
      for (const [key, text] of Object.entries(value)) {
        const term = document.createElement("dt"), detail = document.createElement("dd");
        term.textContent = key;
        detail.textContent = String(text);
        list.append(term, detail);
      }
      tip.append(list);
    } else tip.textContent = String(value ?? "");
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18, above = event.clientY - tip.offsetHeight - 12;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${below + tip.offsetHeight > innerHeight ? Math.max(8, above) : below}px`;
  }

  function tooltip(_handler, event, _item, value) {
    if (value === null || value === undefined || value === "" || value === false) tip.hidden = true;
    else showTip(event, value);
  }

  async function embed(element, spec, dark, renderer) {
    const marks = Object.values(spec.datasets ?? {}).reduce((sum, data) => sum + data.length, 0);
    const result = await vegaEmbed(element, spec, {
      mode: "vega-lite", actions: false, defaultStyle: false, ast: true, tooltip,
      logLevel: 1, // errors only: a panel without a null line makes Vega warn of an empty extent
      renderer: renderer ?? (marks > MANY ? "canvas" : "svg"),
      config: dark ? report.themes.dark : report.themes.light,
    });
    return result.view;
  }

  // Draws `make(width)` into an element, now and whenever the theme or the width changes; `after(view)` connects it.
  async function draw(element, make, after) {
    const turn = (element.turn = (element.turn ?? 0) + 1);
    drawn.set(element, () => draw(element, make, after));
    const width = element.clientWidth || 640; // a page that is only printed has no width yet
    element.width = width;
    const stage = document.createElement("div");
    const view = await embed(stage, make(width), isDark());
    if (element.turn !== turn) return view.finalize();
    element.view?.finalize();
    element.view = view;
    element.replaceChildren(...stage.childNodes);
    element.dataset.ready = turn;
    after?.(view);
  }

  // Words in place of a chart.
  function say(element, text) {
    drawn.delete(element);
    element.view?.finalize();
    element.view = null;
    element.turn = (element.turn ?? 0) + 1;
    element.textContent = text;
    element.dataset.ready = element.turn;
  }

  // Downloads are for paper: the light theme whatever the screen, in the state that is shown.
  async function svg(spec) {
    const view = await embed(document.createElement("div"), spec, false, "svg");
    const text = await view.toSVG();
    view.finalize();
    return text;
  }

  function save(name, type, ...parts) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(parts, { type }));
    link.download = name.replace(/[^\p{L}\p{N}._-]+/gu, "_").slice(0, 120);
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }

  const quote = (value) => {
    const text = value === null || value === undefined || Number.isNaN(value) ? "" : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const line = (values) => values.map(quote).join(",") + "\r\n";

  function csv(table) {
    const columns = table.columns.map(column);
    return line(table.names) + Array.from({ length: table.rows }, (_, i) => line(columns.map((c) => c[i]))).join("");
  }

  function buttons(place, name, spec, tables) {
    const add = (label, title, act) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = label;
      button.setAttribute("aria-label", title);
      button.addEventListener("click", act);
      place.append(button);
    };
    add("SVG", `Download ${name} as SVG`, async () => save(`${name}.svg`, "image/svg+xml", await svg(spec())));
    for (const [label, text] of Object.entries(tables))
      add(label, `Download ${name}: ${label}`, () => save(`${name}${label === "CSV" ? "" : "-all"}.csv`, "text/csv;charset=utf-8", ...[text()].flat()));
  }

  function showTable(place, table) {
    const most = 200, columns = table.columns.map(column), head = document.createElement("tr"), body = document.createElement("tbody");
    const numeric = columns.map((c) => c.some((v) => typeof v === "number") && c.every((v) => v === null || typeof v === "number"));
    const put = (row, kind, text, k) => {
      const cell = document.createElement(kind);
      cell.textContent = text;
      if (numeric[k]) cell.className = "n";
      else if (text.length > 30) cell.title = text;
      row.append(cell);
    };
    table.names.forEach((name, k) => put(head, "th", name, k));
    for (let i = 0; i < Math.min(most, table.rows); i++) {
      const row = document.createElement("tr");
      columns.forEach((c, k) => put(row, "td", c[i] === null ? "" : String(c[i]), k));
      body.append(row);
    }
    const whole = document.createElement("table"), top = document.createElement("thead");
    top.append(head);
    whole.append(top, body);
    place.replaceChildren(whole);
    if (table.rows > most) place.previousElementSibling.append(` — the first ${most} of ${table.rows} rows; all are in the CSV file`);
  }

  // A figure of an analysis, as its module defined it.
  function figure(element) {
    const figure = report.figures[element.dataset.figure];
    const whole = () => ({ ...figure.spec, datasets: Object.fromEntries(Object.entries(figure.datasets).map(([k, t]) => [k, rows(t)])) });
    const place = element.querySelector(".chart"), make = (width) => fit(whole(), width);
    buttons(element.querySelector(".downloads"), element.dataset.figure, () => make(Math.max(place.clientWidth, 640)), { CSV: () => csv(figure.table) });
    const details = element.querySelector("details");
    details.addEventListener("toggle", () => showTable(details.querySelector(".scroll"), figure.table), { once: true });
    return draw(place, make);
  }

  function redraw(all) {
    tip.hidden = true;
    for (const [element, again] of drawn)
      if (element.clientWidth && (all || Math.abs(element.clientWidth - element.width) > 8)) again();
      else if (all) element.width = 0; // on a closed page: drawn again when it opens
  }

  return { report, fill, fit, draw, say, buttons, line, figure, redraw, isDark };
})();
