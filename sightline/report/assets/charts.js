// Draws the charts of the page: data, theme, size, tooltip, downloads. Everything that comes from users is set as text, never as HTML.
"use strict";

const Charts = (() => {
  const report = Data.common;
  const drawn = new Map(); // element -> function that draws it again
  const SCALED = 1.15; // how much wider than its place a chart may be: the style sheet scales it down
  const MANY = 4000; // marks; above this a canvas is quicker than an SVG tree

  const isDark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const setScheme = () => document.documentElement.classList.toggle("dark", isDark());
  setScheme();

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

  // The table of a figure, whose columns may be those of one of its datasets.
  const whole = (table, datasets) => ({ ...table, columns: table.columns.map((c) => (c.of ? datasets[c.of[0]].columns[c.of[1]] : c)) });

  // Makes a figure follow the choice of encoders: hidden ones are left out of its data, others are faint beside the one pointed at.
  // `fields` are the columns that name encoders. Their legend stands beside the chart, in the page.
  function chosen(spec, fields) {
    if (!fields.length) return spec;
    const there = fields.map((f) => `indexof(hidden_encoders, datum[${JSON.stringify(f)}]) < 0`).join(" && ");
    const walk = (part) => {
      if (Array.isArray(part)) return part.map(walk);
      if (!part || typeof part !== "object") return part;
      const made = Object.fromEntries(Object.entries(part).map(([key, value]) => [key, key === "datasets" ? value : walk(value)]));
      if (made.data?.name) made.transform = [{ filter: there }, ...(made.transform ?? [])];
      const own = made.encoding && ["color", "detail"].map((channel) => made.encoding[channel]?.field).find((f) => fields.includes(f));
      if (made.mark && own) {
        const mark = typeof made.mark === "string" ? { type: made.mark } : made.mark, full = mark.opacity ?? (mark.type === "area" ? 0.7 : 1);
        const lit = `pointed_encoder === '' || datum[${JSON.stringify(own)}] === pointed_encoder`;
        made.encoding = { ...made.encoding, opacity: made.encoding.opacity ?? { condition: { test: lit, value: full }, value: 0.12 * full } };
        for (const channel of ["color", "shape", "fill", "stroke"])
          if (fields.includes(made.encoding[channel]?.field)) made.encoding[channel] = { ...made.encoding[channel], legend: null };
      }
      return made;
    };
    const params = [{ name: "hidden_encoders", value: Encoders.hidden }, { name: "pointed_encoder", value: Encoders.pointed }];
    return { ...walk(spec), params: [...(spec.params ?? []), ...params] };
  }

  function follow() {
    for (const element of drawn.keys())
      if (element.view && element.follows && element.clientWidth)
        element.view.signal("hidden_encoders", Encoders.hidden).signal("pointed_encoder", Encoders.pointed).runAsync();
  }

  // Pointing at a mark points at its encoder; a click shows it alone.
  function connect(element, fields) {
    const named = (item) => fields.map((f) => item?.datum?.[f]).filter((name) => Encoders.names.includes(name));
    return (view) => {
      element.follows = true;
      view.addEventListener("mousemove", (_event, item) => Encoders.point(new Set(named(item)).size === 1 ? named(item)[0] : ""));
      view.addEventListener("mouseout", () => Encoders.point(""));
      view.addEventListener("click", (_event, item) => new Set(named(item)).size === 1 && item.mark.marktype !== "group" && Encoders.only(named(item)[0]));
    };
  }

  // Gives a chart the width there is; those whose parts stand side by side are scaled down by the style sheet if need be.
  function fit(spec, width) {
    const shape = spec.usermeta?.shape;
    spec = structuredClone(spec);
    if (shape === "map") {
      const ratio = spec.height / spec.width;
      spec.width = Math.floor(Math.min(width - 10, 620));
      spec.height = Math.floor(spec.width * ratio);
      return spec;
    }
    if (spec.facet && !spec.facet.row && !spec.facet.column) {
      const square = shape === "heatmap", own = typeof spec.spec.width === "number" ? spec.spec.width : 260;
      const ratio = typeof spec.spec.height === "number" ? spec.spec.height / own : 0.62;
      const panels = new Set(Object.values(spec.datasets).flat().map((row) => row[spec.facet.field]).filter((v) => v !== undefined)).size;
      const phone = width < 500, small = phone && panels > 8; // two side by side rather than pages of one below the other
      const side = square ? (phone ? 100 : 150) : small ? 100 : Math.min(own, 215), around = square ? 64 : 34, edge = square ? 12 : 60;
      const most = Math.max(1, Math.min(panels, Math.floor((width - edge) / (side + around))));
      const across = Math.ceil(panels / Math.ceil(panels / most)); // rows of the same length
      const each = Math.min((width - edge) / across - around, square ? 260 : 860);
      spec.columns = across;
      spec.facet.header = { ...spec.facet.header, labelLimit: Math.floor(each + around - 12) };
      if (typeof spec.spec.width === "number" || shape) {
        spec.spec.width = Math.floor(each);
        spec.spec.height = Math.floor(square ? each : Math.max(small ? 100 : 150, Math.min(360, each * ratio)));
      }
      if (phone) spec.config = { ...spec.config, legend: { ...spec.config?.legend, orient: "top" } }; // beside it, it would narrow the panels
    } else if (!spec.hconcat && !spec.vconcat && !spec.concat && !spec.repeat && (shape === "curve" || typeof spec.width === "number")) {
      spec.width = Math.floor(Math.min(width - 84, 1100));
      if (typeof spec.height === "number") spec.height = Math.floor(Math.max(200, Math.min(420, spec.width * 0.5)));
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
      config: { ...(dark ? report.themes.dark : report.themes.light), aria: false, mark: { aria: false } },
    });
    return result.view;
  }

  // The same chart with one part fewer side by side; undefined if each part has a row already.
  function fewer(spec) {
    if (spec.hconcat) return fewer({ ...spec, hconcat: undefined, concat: spec.hconcat, columns: spec.hconcat.length });
    const kind = ["concat", "vconcat"].find((name) => spec[name]), panels = spec.concat?.length ?? 9; // a facet has its columns
    const columns = Math.min(spec.columns ?? panels, panels);
    if ((spec.concat || spec.facet?.field) && columns > 1) return { ...spec, columns: columns - 1 };
    const inner = kind && spec[kind].map((part) => fewer(part) ?? part);
    return inner?.some((part, i) => part !== spec[kind][i]) ? { ...spec, [kind]: inner } : undefined;
  }

  function narrowed(spec, by) {
    const made = typeof spec.width === "number" ? { ...spec, width: Math.floor(spec.width * by) } : { ...spec };
    for (const kind of ["concat", "hconcat", "vconcat"]) if (spec[kind]) made[kind] = spec[kind].map((part) => narrowed(part, by));
    if (spec.spec) made.spec = narrowed(spec.spec, by);
    return made;
  }

  // Draws a chart of several parts; if it is too wide, with narrower parts, or else with fewer of them side by side.
  async function fitting(spec, width) {
    for (let next = spec, narrow = false; ; ) {
      const stage = document.createElement("div"), view = await embed(stage, next, isDark()), picture = stage.querySelector("svg, canvas");
      const wide = parseFloat(picture.style.width || picture.getAttribute("width")), least = 0.7;
      const enough = wide <= SCALED * width || !(spec.concat || spec.hconcat || spec.vconcat), less = enough ? undefined : fewer(spec);
      if (enough || (narrow && !less)) return { stage, view };
      view.finalize();
      if (!narrow && (width > least * wide || !less)) [next, narrow] = [narrowed(spec, Math.max(least, width / wide)), true];
      else [spec, next, narrow] = [less, less, false];
    }
  }

  // Draws `make(width)` into an element, now and whenever the theme or the width changes; `after(view)` connects it.
  async function draw(element, make, after) {
    const turn = (element.turn = (element.turn ?? 0) + 1);
    drawn.set(element, () => draw(element, make, after));
    const width = element.clientWidth || 640; // a page that is only printed has no width yet
    element.width = width;
    const { stage, view } = await fitting(make(width), width);
    if (element.turn !== turn) return view.finalize();
    element.view?.finalize();
    element.view = view;
    // The place of a chart has its name, and the table its numbers: thousands of marks without a name would only be in the way.
    for (const mark of stage.querySelectorAll("[role^=graphics]")) mark.removeAttribute("role"), mark.removeAttribute("aria-roledescription");
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
    const harmless = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;  // as core/tables.py
    const text = harmless === null || harmless === undefined || Number.isNaN(harmless) ? "" : String(harmless);
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
  function figure(element, figure) {
    const { fields, datasets } = figure, table = whole(figure.table, datasets);
    const all = () => ({ ...figure.spec, datasets: Object.fromEntries(Object.entries(datasets).map(([k, t]) => [k, rows(t)])) });
    const place = element.querySelector(".chart"), make = (width) => chosen(fit(all(), width), fields);
    buttons(element.querySelector(".downloads"), element.dataset.figure, () => paper(fit(all(), Math.max(place.clientWidth, 640)), fields), { CSV: () => csv(table) });
    const details = element.querySelector("details.table");
    details?.addEventListener("toggle", () => showTable(details.querySelector(".scroll"), table), { once: true });
    const drawnNames = new Set(Object.values(datasets).flatMap((t) => t.names.flatMap((name, k) => (fields.includes(name) ? t.columns[k].words : []))));
    const legend = element.querySelector(".legend");
    if (drawnNames.size > 1 && figure.spec.usermeta?.shape !== "map" && coloured(figure.spec, fields)) Encoders.legend(legend, drawnNames);
    else legend?.remove();
    return draw(place, make, fields.length ? connect(place, fields) : undefined);
  }

  // Whether colours tell encoders.
  const coloured = (part, fields) =>
    Array.isArray(part) ? part.some((p) => coloured(p, fields))
    : Boolean(part) && typeof part === "object" && (fields.includes(part.encoding?.color?.field) || Object.entries(part).some(([key, p]) => key !== "datasets" && coloured(p, fields)));

  // For paper: what is chosen, with its legend.
  function paper(spec, fields) {
    const kept = (row) => fields.every((f) => row[f] === undefined || Encoders.visible(row[f]));
    const walk = (part) => {
      if (Array.isArray(part)) return part.map(walk);
      if (!part || typeof part !== "object") return part;
      const made = Object.fromEntries(Object.entries(part).map(([key, value]) => [key, key === "datasets" ? value : walk(value)]));
      for (const channel of ["color", "shape"]) {
        const own = made[channel], names = own?.legend?.values ?? own?.scale?.domain;
        if (fields.includes(own?.field) && Array.isArray(names) && own.legend !== null)
          made[channel] = { ...own, legend: { ...own.legend, values: names.filter(Encoders.visible) } };
      }
      return made;
    };
    return { ...walk(spec), datasets: Object.fromEntries(Object.entries(spec.datasets).map(([k, data]) => [k, data.filter(kept)])) };
  }

  function redraw(all) {
    tip.hidden = true;
    if (all) setScheme(), Encoders.tell();
    for (const [element, again] of drawn)
      if (element.clientWidth && (all || Math.abs(element.clientWidth - element.width) > 8)) again();
      else if (all) element.width = 0; // on a closed page: drawn again when it opens
  }

  Encoders.listen(follow);
  return { report, fill, fit, draw, say, buttons, line, figure, redraw, isDark, setScheme };
})();
