// The linked view: two encoders, a type of layer and a token view are chosen; a heat map of all their pairs of layers, beside it the
// curve over depth. The values come as float32 arrays: for each token view and pair of encoders one block, rows the layers of A.
"use strict";

class Explorer {
  constructor(element) {
    this.element = element;
    this.data = Charts.report.explorers[element.dataset.explorer];
    this.arrays = Object.fromEntries(Object.entries(this.data.values).map(([name, packed]) => [name, this.unpack(packed)]));
    this.heat = element.querySelector(".heat");
    this.curve = element.querySelector(".curve");
    this.readout = element.querySelector(".readout");
    this.connect();
  }

  unpack({ base64, symmetric }) {
    const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
    const sizes = this.data.sites.map((sites) => sites.length), n = sizes.length, starts = [];
    let at = 0;
    for (let t = 0; t < this.data.tokens.length; t++)
      for (let a = 0; a < n; a++)
        for (let b = symmetric ? a : 0; b < n; b++) {
          starts[(t * n + a) * n + b] = at;
          at += sizes[a] * sizes[b];
        }
    return { values: new Float32Array(bytes.buffer), starts, symmetric };
  }

  at(name, t, a, b, i, j) {
    const array = this.arrays[name];
    if (!array) return null;
    if (array.symmetric && a > b) [a, b, i, j] = [b, a, j, i];
    const start = array.starts[(t * this.data.encoders.length + a) * this.data.encoders.length + b];
    const value = array.values[start + i * this.data.sites[b].length + j];
    return Number.isFinite(value) ? Number(value.toPrecision(7)) : null;
  }

  reason(t, a, b, i, j) {
    const word = (e, k) => this.data.reasons[this.data.reason[t][e][k]];
    const parts = [[a, i], [b, j]].filter(([e, k]) => word(e, k)).map(([e, k]) => `${this.data.sites[e][k]} of ${this.data.encoders[e]}: ${word(e, k)}`);
    return [...new Set(parts)].join("; ");
  }

  value(t, a, b, i, j) {
    const { at } = this;
    const value = at.call(this, "value", t, a, b, i, j);
    return {
      value, low: at.call(this, "low", t, a, b, i, j), high: at.call(this, "high", t, a, b, i, j), null: at.call(this, "null", t, a, b, i, j),
      reason: value === null ? this.reason(t, a, b, i, j) : "",
    };
  }

  chosen() {
    const pick = (name) => Number(this.element.querySelector(`[name=${name}]`).value);
    return { a: pick("a"), b: pick("b"), t: pick("tokens"), type: this.data.types[pick("type")] };
  }

  ofType(encoder, type) {
    return this.data.sites[encoder].map((_, k) => k).filter((k) => type === "all" || this.data.kinds[encoder][k] === type);
  }

  compute() {
    const { a, b, t, type } = this.chosen(), { encoders, sites } = this.data;
    const rows = this.ofType(a, type), columns = this.ofType(b, type);
    const cells = rows.flatMap((i) => columns.map((j) => ({
      row: sites[a][i], column: sites[b][j], a: encoders[a], b: encoders[b], site_a: sites[a][i], site_b: sites[b][j], best: false,
      ...this.value(t, a, b, i, j),
    })));
    const best = rows.map((i, r) => {
      const own = cells.slice(r * columns.length, (r + 1) * columns.length).filter((c) => c.value !== null && !(a === b && c.row === c.column));
      return own.reduce((top, c) => (top === null || c.value > top.value ? c : top), null);
    });
    if (a !== b) for (const cell of best) if (cell) cell.best = true;
    return { a, b, t, type, rows, columns, cells, best, points: this.points(a, b, type, rows, columns, cells, best) };
  }

  // Each layer of A with the layer of B at the same depth (of the same encoder: with the next layer), and with its best match.
  points(a, b, type, rows, columns, cells, best) {
    const last = Math.max(rows.length - 1, 1), sameLength = rows.length === columns.length;
    const blocks = this.data.blocks[a], numbered = sameLength && type !== "all" && rows.every((i) => blocks[i] >= 0);
    const depth = (r) => (numbered ? blocks[rows[r]] : sameLength ? r : r / last);
    const partner = (r) => (a === b ? r + 1 : Math.round((r / last) * (columns.length - 1)));
    const point = (r, cell, series) => ({ ...cell, series, depth: depth(r), site: cell.row });
    const matched = rows.flatMap((_, r) => (partner(r) < columns.length ? [point(r, cells[r * columns.length + partner(r)], a === b ? "next layer" : "same depth")] : []));
    const others = a === b ? [] : best.flatMap((cell, r) => (cell ? [{ ...point(r, cell, "best match"), low: null, high: null, null: null }] : []));
    return { title: numbered ? "block" : sameLength ? "layer, in order of computation" : "relative depth of A", rows: [...others, ...matched] };
  }

  heatSpec(width) {
    const s = this.state, { encoders, sites, spec } = this.data;
    const names = (encoder, own) => own.map((k) => sites[encoder][k]);
    const longest = Math.max(...names(s.a, s.rows).map((name) => name.length), 1);
    const side = Math.max(120, Math.min(width - Math.min(longest * 6.2, 180) - 40, 34 * s.columns.length + 60, 620));
    const label = (step) => Math.max(8, Math.min(11, Math.floor(step - 1)));
    const filled = Charts.fill(spec.heat, { "@row": encoders[s.a], "@column": encoders[s.b], "@rows": names(s.a, s.rows), "@columns": names(s.b, s.columns) });
    const height = Math.max(100, Math.min(side * (s.rows.length / s.columns.length), 1.6 * side));
    return {
      ...filled, width: Math.floor(side), height: Math.floor(height), datasets: { cells: s.cells },
      config: { axisX: { labelFontSize: label(side / s.columns.length), titleLimit: side }, axisY: { labelFontSize: label(height / s.rows.length), titleLimit: height } },
    };
  }

  curveSpec(width) {
    const s = this.state;
    const series = [...new Set(s.points.rows.map((p) => p.series))].reverse();
    const filled = Charts.fill(this.data.spec.curve, { "@depth": s.points.title, "@series": series });
    return Charts.fit({ ...filled, datasets: { points: s.points.rows } }, width);
  }

  async show() {
    this.state = this.compute();
    const { cells, best, rows, columns } = this.state;
    this.closest = best.reduce((top, c) => (c && (!top || c.value > top.value) ? c : top), null);
    this.cell = this.closest ?? cells[0];
    this.pinned = false;
    this.state.empty = !rows.length || !columns.length;
    for (const button of this.element.querySelectorAll(".downloads button")) button.disabled = this.state.empty;
    if (this.state.empty) {
      for (const place of [this.heat, this.curve]) Charts.say(place, "One of the two encoders has no layer of this type.");
      this.readout.textContent = "";
      return;
    }
    await Promise.all([
      Charts.draw(this.heat, (width) => this.heatSpec(width), (view) => this.listen(view)),
      Charts.draw(this.curve, (width) => this.curveSpec(width), (view) => this.listen(view)),
    ]);
    this.mark(this.cell);
  }

  listen(view) {
    const found = (item) => item?.datum?.row && this.state.cells.find((c) => c.row === item.datum.row && c.column === item.datum.column);
    view.addEventListener("mousemove", (_event, item) => !this.pinned && found(item) && this.mark(found(item)));
    view.addEventListener("click", (_event, item) => {
      const cell = found(item);
      this.pinned = Boolean(cell) && !(this.pinned && cell === this.cell);
      if (cell) this.mark(cell);
    });
    if (this.cell) this.mark(this.cell);
  }

  mark(cell) {
    if (!cell) return;
    this.cell = cell;
    for (const place of [this.heat, this.curve]) {
      if (!place.view) continue;
      place.view.signal("marked_row", cell.row);
      if (place === this.heat) place.view.signal("marked_column", cell.column);
      place.view.runAsync();
    }
    this.read(cell);
  }

  read(cell) {
    const { rows, columns, best, cells, a, b } = this.state, number = (v) => v.toFixed(4);
    const top = best[Math.floor(cells.indexOf(cell) / columns.length)];
    const strong = document.createElement("strong"), more = document.createElement("div"), where = document.createElement("div");
    where.textContent = `${cell.row} of ${cell.a} × ${cell.column} of ${cell.b}`;
    strong.textContent = cell.value === null ? "NaN" : number(cell.value);
    const tail = [cell.low !== null && cell.high !== null && `95 % interval ${number(cell.low)} – ${number(cell.high)}`, cell.null !== null && `shuffled null ${number(cell.null)}`];
    const line = document.createElement("div");
    line.append(`${this.data.label} `, strong, cell.value === null ? ` — ${cell.reason || "no value"}` : tail.filter(Boolean).map((part) => ` · ${part}`).join(""));
    if (top) more.textContent = a === b ? `Most similar other layer: ${top.column} (${number(top.value)})` : `Best match of ${cell.row} in ${top.b}: ${top.column} (${number(top.value)})`;
    if (this.closest && a !== b) more.textContent += ` · closest layers of all: ${this.closest.row} and ${this.closest.column} (${number(this.closest.value)})`;
    this.readout.replaceChildren(where, line, more);
    this.readout.dataset.cell = `${rows[Math.floor(cells.indexOf(cell) / columns.length)]},${columns[cells.indexOf(cell) % columns.length]}`;
  }

  step(event) {
    const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [1, 0], ArrowDown: [-1, 0] }[event.key];
    if (event.key === "Escape") this.pinned = false;
    if (!move || this.state.empty) return;
    event.preventDefault();
    const { rows, columns, cells } = this.state, at = cells.indexOf(this.cell);
    const r = Math.min(rows.length - 1, Math.max(0, Math.floor(at / columns.length) + move[0]));
    const c = Math.min(columns.length - 1, Math.max(0, (at % columns.length) + move[1]));
    this.mark(cells[r * columns.length + c]);
  }

  csvLine(t, a, b, i, j) {
    const { tokens, encoders, sites } = this.data, v = this.value(t, a, b, i, j);
    return Charts.line([tokens[t], encoders[a], sites[a][i], encoders[b], sites[b][j], v.value, v.low, v.high, v.null, v.reason]);
  }

  csv(all) {
    const label = this.data.variable, { a, b, t, rows, columns } = this.state;
    const parts = [Charts.line(["tokens", "encoder_a", "site_a", "encoder_b", "site_b", label, `${label}_low`, `${label}_high`, `${label}_null`, "reason"])];
    if (!all) for (const i of rows) for (const j of columns) parts.push(this.csvLine(t, a, b, i, j));
    else
      this.data.tokens.forEach((_, t) => this.data.sites.forEach((own, a) => this.data.sites.forEach((other, b) =>
        parts.push(own.map((_, i) => other.map((_, j) => this.csvLine(t, a, b, i, j)).join("")).join("")))));
    return parts;
  }

  connect() {
    for (const select of this.element.querySelectorAll("select")) select.addEventListener("change", () => this.show());
    this.heat.addEventListener("keydown", (event) => this.step(event));
    const name = this.element.dataset.explorer, places = this.element.querySelectorAll(".downloads");
    const width = (place) => Math.max(place.clientWidth, 560);
    const marked = (spec) => ({ ...spec, params: spec.params.map((p) => (p.name === "marked_row" ? { ...p, value: this.cell.row } : p.name === "marked_column" ? { ...p, value: this.cell.column } : p)) });
    Charts.buttons(places[0], `${name}-heatmap`, () => marked(this.heatSpec(width(this.heat))), { CSV: () => this.csv(false), "CSV of everything": () => this.csv(true) });
    Charts.buttons(places[1], `${name}-curve`, () => marked(this.curveSpec(width(this.curve))), {});
  }
}
