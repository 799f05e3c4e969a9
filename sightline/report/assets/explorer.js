// The linked view: two encoders, a type of layer, a measure and a token view are chosen; a heat map of all their pairs of layers, beside it
// the curve over depth. The values come as one row of numbers: for each measure, token view and pair of encoders a block, rows the layers of A.
"use strict";

class Explorer {
  constructor(element, data) {
    this.element = element;
    this.data = data;
    this.heat = element.querySelector(".heat");
    this.curve = element.querySelector(".curve");
    this.readout = element.querySelector(".readout");
  }

  async start() {
    const parts = Object.entries(this.data.values);
    const arrays = await Promise.all(parts.map(async ([name, part]) => [name, this.placed(await Data.numbers(part.packed), part.symmetric)]));
    this.arrays = Object.fromEntries(arrays);
    this.connect();
    this.small();
    await this.show();
  }

  placed(values, symmetric) {
    const sizes = this.data.sites.map((sites) => sites.length), n = sizes.length, starts = [];
    let at = 0;
    for (let t = 0; t < this.data.measures.length * this.data.tokens.length; t++)
      for (let a = 0; a < n; a++)
        for (let b = symmetric ? a : 0; b < n; b++) {
          starts[(t * n + a) * n + b] = at;
          at += sizes[a] * sizes[b];
        }
    return { values, starts, symmetric };
  }

  // In units of the last digit; NaN where there is none.
  whole(name, t, a, b, i, j) {
    const array = this.arrays[name];
    if (!array) return NaN;
    if (array.symmetric && a > b) [a, b, i, j] = [b, a, j, i];
    const start = array.starts[(t * this.data.encoders.length + a) * this.data.encoders.length + b];
    const value = array.values[start + i * this.data.sites[b].length + j];
    return value === -32768 ? NaN : value;
  }

  at(name, t, a, b, i, j) {
    const value = this.whole(name, t, a, b, i, j), from = () => this.whole("value", t, a, b, i, j);
    const found = name === "low" ? from() - value : name === "high" ? from() + value : value;
    return Number.isNaN(found) ? null : Number((found / 10 ** this.data.places).toFixed(Math.max(0, this.data.places)));
  }

  reason(t, a, b, i, j) {
    const word = (e, k) => this.data.reasons[this.data.reason[t % this.data.tokens.length][e][k]];
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
    const pick = (name) => Number(this.element.querySelector(`[name=${name}]`)?.value ?? 0), { measures, tokens, types } = this.data;
    const m = Math.max(0, measures.findIndex(({ name }) => name === this.element.querySelector("[name=measure]")?.value));
    return { a: pick("a"), b: pick("b"), t: m * tokens.length + pick("tokens"), measure: measures[m], type: types[pick("type")] };
  }

  // Of two cells the one whose layers are more alike.
  static closer(one, other, measure) {
    return !one || (measure.distance ? other.value < one.value : other.value > one.value) ? other : one;
  }

  ofType(encoder, type) {
    return this.data.sites[encoder].map((_, k) => k).filter((k) => type === "all" || this.data.kinds[encoder][k] === type);
  }

  compute() {
    const { a, b, t, type, measure } = this.chosen(), { encoders, sites } = this.data;
    const rows = this.ofType(a, type), columns = this.ofType(b, type);
    const cells = rows.flatMap((i) => columns.map((j) => ({
      row: sites[a][i], column: sites[b][j], a: encoders[a], b: encoders[b], site_a: sites[a][i], site_b: sites[b][j], best: false,
      ...this.value(t, a, b, i, j),
    })));
    const best = rows.map((i, r) => {
      const own = cells.slice(r * columns.length, (r + 1) * columns.length).filter((c) => c.value !== null && !(a === b && c.row === c.column));
      return own.reduce((top, c) => Explorer.closer(top, c, measure), null);
    });
    if (a !== b) for (const cell of best) if (cell) cell.best = true;
    return { a, b, t, type, measure, rows, columns, cells, best, points: this.points(a, b, type, rows, columns, cells, best) };
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
    const side = Math.max(120, Math.min(width - Math.min(longest * 6.2, 180) - 40, 40 * s.columns.length + 60, 720));
    const label = (step) => Math.max(8, Math.min(11, Math.floor(step - 1)));
    const { title, distance, top } = s.measure; // what is alike is bright
    const filled = Charts.fill(spec.heat, { "@label": title, "@dark": distance ? top : 0, "@bright": distance ? 0 : top, "@row": encoders[s.a], "@column": encoders[s.b], "@rows": names(s.a, s.rows), "@columns": names(s.b, s.columns) });
    const height = Math.max(100, Math.min(side * (s.rows.length / s.columns.length), 1.6 * side));
    return {
      ...filled, width: Math.floor(side), height: Math.floor(height), datasets: { cells: s.cells },
      config: { axisX: { labelFontSize: label(side / s.columns.length), titleLimit: side }, axisY: { labelFontSize: label(height / s.rows.length), titleLimit: height } },
    };
  }

  curveSpec(width) {
    const s = this.state;
    const series = [...new Set(s.points.rows.map((p) => p.series))].reverse();
    const filled = Charts.fill(this.data.spec.curve, { "@label": s.measure.title, "@top": s.measure.top, "@depth": s.points.title, "@series": series });
    const fitted = Charts.fit({ ...filled, datasets: { points: s.points.rows } }, width);
    for (const { encoding } of s.points.title === "block" ? fitted.layer : [])
      if (encoding?.x?.axis) Object.assign(encoding.x.axis, { tickMinStep: 1, labelExpr: "datum.value % 1 ? '' : format(datum.value, 'd')" });
    return { ...fitted, width: Math.floor(width - 150), height: 280 };
  }

  // One small matrix as a picture with a pixel for each pair of layers, the first layers at the bottom left.
  static RAMP = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];

  paint(canvas, t, a, b, type) {
    const rows = this.ofType(a, type), columns = this.ofType(b, type), unit = 10 ** this.data.places, ramp = Explorer.RAMP;
    const { distance, top } = this.data.measures[Math.floor(t / this.data.tokens.length)];
    canvas.width = Math.max(1, columns.length);
    canvas.height = Math.max(1, rows.length);
    const pixels = new ImageData(canvas.width, canvas.height);
    let sum = 0, count = 0;
    rows.forEach((i, r) => columns.forEach((j, c) => {
      const value = this.whole("value", t, a, b, i, j) / unit, at = 4 * ((rows.length - 1 - r) * columns.length + c);
      if (Number.isNaN(value)) return pixels.data.set([150, 155, 165, 90], at);
      sum += value;
      count += 1;
      const share = Math.min(1, Math.max(0, value / top)), place = (distance ? 1 - share : share) * (ramp.length - 1), k = Math.min(ramp.length - 2, Math.floor(place));
      pixels.data.set([...ramp[k].map((from, part) => from + (place - k) * (ramp[k + 1][part] - from)), 255], at);
    }));
    canvas.getContext("2d").putImageData(pixels, 0, 0);
    return count ? (sum / count).toFixed(2) : null;
  }

  tile(group, act) {
    const button = document.createElement("button"), canvas = document.createElement("canvas");
    button.type = "button";
    button.className = "tile";
    button.append(canvas);
    button.addEventListener("click", act);
    group.append(button);
    return { button, canvas };
  }

  pick(values) {
    for (const [name, value] of Object.entries(values)) {
      const select = this.element.querySelector(`[name=${name}]`);
      select.value = value;
      if (name === "measure") select.dispatchEvent(new Event("change")); // the figures below follow it, too
    }
    if (!("measure" in values)) this.show();
  }

  // The arrow keys move within a group of tiles, so that it is one stop of the tabulator.
  static roam(place, across) {
    place.addEventListener("keydown", (event) => {
      const tiles = [...place.querySelectorAll(".tile")], at = tiles.indexOf(document.activeElement);
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across(), ArrowUp: -across() }[event.key];
      if (at < 0 || !step || !tiles[at + step]) return;
      event.preventDefault();
      tiles[at].tabIndex = -1;
      tiles[at + step].tabIndex = 0;
      tiles[at + step].focus();
    });
  }

  // Tiles with words below them, one for each of `names`.
  row(place, names, act) {
    if (!place) return [];
    const tiles = names.map((name) => {
      const tile = this.tile(place, () => act(name)), words = document.createElement("span");
      tile.button.append(words);
      return { ...tile, words, name };
    });
    Explorer.roam(place, () => tiles.length);
    return tiles;
  }

  // Measures and layer types side by side, and all pairs of encoders: made once, painted again whenever the choice changes.
  small() {
    const { types, measures, encoders, order } = this.data, pairs = this.element.querySelector(".pairs");
    this.measures = this.row(this.element.querySelector(".measures"), measures, ({ name }) => this.pick({ measure: name }));
    this.types = this.row(this.element.querySelector(".types"), types, (type) => this.pick({ type: types.indexOf(type) }));
    this.pairs = [];
    if (!pairs) return;
    pairs.style.setProperty("--count", encoders.length);
    const head = (text, way) => Object.assign(document.createElement("span"), { className: `head ${way}`, textContent: text, title: text });
    pairs.append(document.createElement("span"), ...order.map((b) => head(encoders[b], "across")));
    for (const a of order) {
      pairs.append(head(encoders[a], "down"));
      for (const b of order) this.pairs.push({ ...this.tile(pairs, () => this.pick({ a, b })), a, b });
    }
    Explorer.roam(pairs, () => encoders.length);
    Encoders.listen(() => this.pairs.forEach(({ button, a, b }) => {
      const both = [encoders[a], encoders[b]];
      button.classList.toggle("faint", !both.every(Encoders.visible) || (Encoders.pointed !== "" && !both.includes(Encoders.pointed)));
    }));
  }

  paintSmall() {
    const { a, b, t, type, measure } = this.state, { encoders, measures, tokens } = this.data;
    const show = ({ canvas, words, button }, view, ofType, title, pressed) => {
      const mean = this.paint(canvas, view, a, b, ofType);
      words.textContent = `${title} · ${mean === null ? "none" : `mean ${mean}`}`;
      button.setAttribute("aria-pressed", String(pressed));
      button.tabIndex = pressed ? 0 : -1;
    };
    for (const one of this.types) show(one, t, one.name, one.name, one.name === type);
    this.measures.forEach((one, m) => show(one, m * tokens.length + (t % tokens.length), type, one.name.title, measures[m] === measure));
    const key = `${t} ${type}`, again = key !== this.painted;
    this.painted = key;
    for (const one of this.pairs) {
      if (again) {
        const mean = this.paint(one.canvas, t, one.a, one.b, type);
        one.button.title = `${encoders[one.a]} × ${encoders[one.b]}: ${mean === null ? "no value" : `mean ${measure.title} ${mean}`}`;
        one.button.setAttribute("aria-label", one.button.title);
      }
      one.button.setAttribute("aria-pressed", String(one.a === a && one.b === b));
      one.button.tabIndex = one.a === a && one.b === b ? 0 : -1;
    }
  }

  async show() {
    this.state = this.compute();
    this.paintSmall();
    const { cells, best, rows, columns, measure } = this.state;
    this.closest = best.reduce((top, c) => (c ? Explorer.closer(top, c, measure) : top), null);
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
    const { rows, columns, best, cells, a, b, measure } = this.state, number = (v) => v.toFixed(4);
    const top = best[Math.floor(cells.indexOf(cell) / columns.length)];
    const strong = document.createElement("strong"), more = document.createElement("div"), where = document.createElement("div");
    where.textContent = `${cell.row} of ${cell.a} × ${cell.column} of ${cell.b}`;
    strong.textContent = cell.value === null ? "NaN" : number(cell.value);
    const tail = [cell.low !== null && cell.high !== null && `95 % interval ${number(cell.low)} – ${number(cell.high)}`, cell.null !== null && `shuffled null ${number(cell.null)}`];
    const line = document.createElement("div");
    line.append(`${measure.title} `, strong, cell.value === null ? ` — ${cell.reason || "no value"}` : tail.filter(Boolean).map((part) => ` · ${part}`).join(""));
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
    const { measures, tokens, encoders, sites } = this.data, v = this.value(t, a, b, i, j);
    const which = measures.length > 1 ? [measures[Math.floor(t / tokens.length)].name] : [];
    return Charts.line([...which, tokens[t % tokens.length], encoders[a], sites[a][i], encoders[b], sites[b][j], v.value, v.low, v.high, v.null, v.reason]);
  }

  csv(all) {
    const label = this.data.variable, { a, b, t, rows, columns } = this.state, { measures, tokens } = this.data;
    const parts = [Charts.line([...(measures.length > 1 ? ["measure"] : []), "tokens", "encoder_a", "site_a", "encoder_b", "site_b", label, `${label}_low`, `${label}_high`, `${label}_null`, "reason"])];
    if (!all) for (const i of rows) for (const j of columns) parts.push(this.csvLine(t, a, b, i, j));
    else
      measures.flatMap(() => tokens).forEach((_, t) => this.data.sites.forEach((own, a) => this.data.sites.forEach((other, b) =>
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
