// The attention viewer: an image and a query patch are chosen; each panel shows to which patches the query of one encoder attends, in
// one layer and head. Maps are bytes (image, layer, mean and heads, query, key), keys in rows of the patch grid, 100 the brightest of a query.
"use strict";

class Viewer {
  constructor(element, data) {
    this.element = element;
    this.name = element.dataset.viewer;
    this.data = data;
    this.image = 0;
    this.place = [0.5, 0.5]; // of the query in the picture, from the top and from the left
    this.kept = false;
    this.link = element.querySelector("[name=link]");
  }

  async show() {
    const { element } = this, template = element.querySelector("template"), count = Math.min(2, this.data.encoders.length);
    const pixels = await Promise.all(this.data.pixels.map((text) => Data.unpacked(text)));
    for (const encoder of this.data.encoders)
      Object.assign(encoder, { maps: await Data.unpacked(encoder.maps), pixels: pixels[encoder.pixels], pictures: [] });
    this.panels = Array.from({ length: count }, (_, i) => {
      const place = template.content.firstElementChild.cloneNode(true);
      element.querySelector(".panels").append(place);
      return new ViewerPanel(this, place, i);
    });
    this.link.closest("label").hidden = count < 2;
    this.link.addEventListener("change", () => this.follow(this.panels[0]));
    this.thumbnails();
    this.ramp();
    this.choose(0);
    new ResizeObserver(() => this.panels.some((panel) => panel.canvas.clientWidth !== panel.width) && this.draw()).observe(element);
  }

  // Viridis from its middle on, more opaque the more attention: what gets none stays the darkened picture.
  static colour(value) {
    const stops = [[49, 104, 142], [33, 145, 140], [53, 183, 121], [143, 215, 68], [253, 231, 37]];
    const at = Math.min(1, value) * (stops.length - 1), k = Math.min(stops.length - 2, Math.floor(at));
    return [...stops[k].map((from, c) => from + (at - k) * (stops[k + 1][c] - from)), 235 * value ** 0.7];
  }

  // Values of a grid as a canvas with one pixel per patch.
  static heat(values, rows, columns) {
    const canvas = Viewer.canvas(columns, rows), pixels = new ImageData(columns, rows);
    values.forEach((value, k) => pixels.data.set(Viewer.colour(value), 4 * k));
    canvas.getContext("2d").putImageData(pixels, 0, 0);
    return canvas;
  }

  static canvas(width, height) {
    return Object.assign(document.createElement("canvas"), { width, height });
  }

  // A choice among canvases: a radio button each, so that the keyboard works as everywhere.
  static choice(group, text, chosen, act) {
    const whole = document.createElement("label"), input = document.createElement("input"), canvas = Viewer.canvas(1, 1);
    Object.assign(input, { type: "radio", name: group, checked: chosen });
    input.setAttribute("aria-label", text);
    input.addEventListener("change", act);
    whole.title = text;
    whole.append(input, canvas);
    return whole;
  }

  // The picture as the encoder saw it; or dark and almost grey, for colours to lie on.
  picture(encoder, image, dark = false) {
    const known = (encoder.pictures[image] ??= {});
    if (!known[dark]) {
      const [height, width] = encoder.size, pixels = new ImageData(width, height), start = 3 * height * width * image;
      for (let k = 0; k < height * width; k++) {
        const rgb = encoder.pixels.subarray(start + 3 * k, start + 3 * k + 3), grey = 0.3 * rgb[0] + 0.59 * rgb[1] + 0.11 * rgb[2];
        pixels.data.set([...(dark ? rgb.map((part) => 6 + 0.3 * (0.3 * part + 0.7 * grey)) : rgb), 255], 4 * k);
      }
      known[dark] = Viewer.canvas(width, height);
      known[dark].getContext("2d").putImageData(pixels, 0, 0);
    }
    return known[dark];
  }

  thumbnails() {
    this.thumbs = this.data.images.map(({ id, label }, i) => {
      const text = [id, label].filter(Boolean).join(" · ");
      const thumb = Viewer.choice(`${this.name}-image`, text, i === 0, () => this.choose(i));
      const canvas = thumb.querySelector("canvas"), picture = this.picture(this.data.encoders[0], i);
      Object.assign(canvas, { width: picture.width, height: picture.height });
      canvas.getContext("2d").drawImage(picture, 0, 0);
      return thumb;
    });
    this.element.querySelector(".thumbs").append(...this.thumbs);
  }

  ramp() {
    const canvas = this.element.querySelector(".ramp"), drawing = canvas.getContext("2d");
    drawing.fillStyle = "#14161a";
    drawing.fillRect(0, 0, canvas.width, 1);
    drawing.drawImage(Viewer.heat(Array.from({ length: canvas.width }, (_, k) => k / (canvas.width - 1)), 1, canvas.width), 0, 0);
  }

  choose(image) {
    this.image = image;
    this.element.querySelector(".chosen").textContent = this.thumbs[image].title;
    this.draw();
  }

  // The other panel shows the layer at the same relative depth.
  follow(panel) {
    if (this.link.checked) for (const other of this.panels) if (other !== panel) other.goTo(panel.depth);
    this.draw();
  }

  draw() {
    for (const panel of this.panels) panel.draw();
  }
}

class ViewerPanel {
  constructor(viewer, element, position) {
    Object.assign(this, { viewer, element, position, head: -1 }); // head −1: the mean of all
    this.canvas = element.querySelector(".picture");
    this.slider = element.querySelector("[name=layer]");
    this.select = element.querySelector("select");
    this.readout = element.querySelector(".readout");
    this.select.append(...viewer.data.encoders.map(({ name }, i) => new Option(name, i)));
    this.select.value = position;
    this.use(this.select.value, 1); // where the encoder ends and its decoder, if any, begins
    this.connect();
  }

  use(encoder, depth) {
    this.encoder = this.viewer.data.encoders[encoder];
    this.slider.max = this.encoder.layers.length - 1;
    if (this.head >= this.encoder.heads) this.head = -1;
    this.canvas.style.aspectRatio = `${this.encoder.size[1]} / ${this.encoder.size[0]}`;
    this.canvas.setAttribute("aria-label", `Attention of ${this.encoder.name} over the picture; the arrow keys move the query patch`);
    this.element.setAttribute("aria-label", this.encoder.name);
    const group = `${this.viewer.name}-${this.position}-head`;
    this.choices = Array.from({ length: this.encoder.heads + 1 }, (_, k) => {
      const choose = () => ((this.head = k - 1), this.draw()), words = document.createElement("span");
      const choice = Viewer.choice(group, k ? `head ${k - 1}` : "mean of the heads", this.head === k - 1, choose);
      words.textContent = k ? k - 1 : "mean";
      choice.append(words);
      return choice;
    });
    this.element.querySelector(".heads").replaceChildren(...this.choices);
    this.goTo(depth);
  }

  get layer() {
    return Number(this.slider.value);
  }

  get depth() {
    return this.encoder.depths[this.layer];
  }

  goTo(depth) {
    this.slider.value = ViewerPanel.nearest(this.encoder.depths, (own) => Math.abs(own - depth));
  }

  static nearest(values, distance) {
    const distances = values.map(distance);
    return distances.indexOf(Math.min(...distances));
  }

  patch(key) {
    return [Math.floor(key / this.encoder.grid[1]), key % this.encoder.grid[1]];
  }

  // The middle of a patch, as parts of the height and the width.
  middle(key) {
    return this.patch(key).map((at, axis) => (at + 0.5) / this.encoder.grid[axis]);
  }

  // Which of the queries is nearest to a place in the picture.
  closest(place) {
    return ViewerPanel.nearest(this.encoder.queries, (key) => Math.hypot(...this.middle(key).map((at, axis) => at - place[axis])));
  }

  // Attention of the query to all patches, 1 the brightest; of one head, or (−1, the first map of a layer) their mean.
  map(head) {
    const { maps, grid, heads, layers, queries } = this.encoder, keys = grid[0] * grid[1];
    const place = (this.viewer.image * layers.length + this.layer) * (heads + 1) + head + 1;
    const start = (place * queries.length + this.query) * keys;
    return Float32Array.from(maps.subarray(start, start + keys), (value) => value / 100);
  }

  paint(canvas, values, width) {
    const [height, length] = this.encoder.size, scale = devicePixelRatio, drawing = canvas.getContext("2d");
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round((canvas.width * height) / length);
    drawing.imageSmoothingQuality = "high";
    drawing.drawImage(this.viewer.picture(this.encoder, this.viewer.image, true), 0, 0, canvas.width, canvas.height);
    drawing.imageSmoothingEnabled = false;
    drawing.drawImage(Viewer.heat(values, ...this.encoder.grid), 0, 0, canvas.width, canvas.height);
    return drawing;
  }

  draw() {
    const site = this.encoder.layers[this.layer], name = site.replace(/\.attn_map$/, "");
    this.query = this.closest(this.viewer.place);
    this.values = this.map(this.head);
    this.width = this.canvas.clientWidth;
    this.overlay(this.paint(this.canvas, this.values, this.width || 360)); // a page that is only printed has no width yet
    this.choices.forEach((choice, k) => this.paint(choice.querySelector("canvas"), this.map(k - 1), choice.clientWidth || 56));
    this.element.querySelector("output").textContent = name;
    this.slider.setAttribute("aria-valuetext", name);
    Object.assign(this.element.dataset, { query: this.encoder.queries[this.query], layer: site, head: this.head });
    this.tell();
  }

  // Lines between the patches, dots on those that can be queries, a frame around the one that is.
  overlay(drawing) {
    const { width, height } = drawing.canvas, [rows, columns] = this.encoder.grid, unit = devicePixelRatio;
    const x = width / columns, y = height / rows;
    drawing.fillStyle = "rgb(255 255 255 / 10%)";
    for (let c = 1; c < columns; c++) drawing.fillRect(Math.round(c * x), 0, 1, height);
    for (let r = 1; r < rows; r++) drawing.fillRect(0, Math.round(r * y), width, 1);
    drawing.fillStyle = "rgb(255 255 255 / 45%)";
    if (this.encoder.queries.length < rows * columns)
      for (const key of this.encoder.queries) {
        const [top, left] = this.middle(key);
        drawing.beginPath();
        drawing.arc(left * width, top * height, 1.25 * unit, 0, 2 * Math.PI);
        drawing.fill();
      }
    const [r, c] = this.patch(this.encoder.queries[this.query]);
    for (const [colour, line] of [["#000", 5], ["#fff", 2.5]]) {
      Object.assign(drawing, { strokeStyle: colour, lineWidth: line * unit, lineJoin: "round" });
      drawing.strokeRect(c * x, r * y, x, y);
    }
  }

  tell(pointed) {
    const { grid, queries } = this.encoder, words = ["row", "column"];
    const where = (key) => this.patch(key).map((at, axis) => `${words[axis]} ${at + 1} of ${grid[axis]}`).join(", ");
    const brightest = this.values.indexOf(1), lines = [
      `Query: ${where(queries[this.query])}${this.viewer.kept ? " (kept)" : ""}`,
      brightest < 0 ? "It attends to no patch: its attention is zero, or not a number" : `Brightest: ${where(brightest)}`,
    ];
    if (pointed !== undefined) lines.push(`Here: ${where(pointed)}: ${this.values[pointed].toFixed(2)}`);
    this.readout.replaceChildren(...lines.map((text) => Object.assign(document.createElement("div"), { textContent: text })));
  }

  pointed(event) {
    const box = this.canvas.getBoundingClientRect();
    const at = [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
    const [r, c] = at.map((part, axis) => Math.max(0, Math.min(this.encoder.grid[axis] - 1, Math.floor(part * this.encoder.grid[axis]))));
    return r * this.encoder.grid[1] + c;
  }

  // The place to look at, for both panels, becomes the middle of one of this panel's queries.
  ask(query) {
    this.viewer.place = this.middle(this.encoder.queries[query]);
    this.viewer.draw();
  }

  step(event) {
    const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Escape") (this.viewer.kept = false), this.viewer.draw();
    if (!move) return;
    event.preventDefault();
    const [r, c] = this.patch(this.encoder.queries[this.query]);
    const costs = this.encoder.queries.map((key) => {
      const [down, right] = this.patch(key).map((at, axis) => at - [r, c][axis]);
      const along = down * move[0] + right * move[1], across = Math.abs(down * move[1]) + Math.abs(right * move[0]);
      return along > 0 ? along + 2 * across : Infinity;
    });
    const best = Math.min(...costs);
    if (best < Infinity) this.ask(costs.indexOf(best));
  }

  connect() {
    const { viewer, canvas } = this, asked = (event) => this.closest(this.middle(this.pointed(event)));
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerType === "touch") return; // a finger that scrolls
      if (viewer.kept) this.tell(this.pointed(event));
      else if (asked(event) !== this.query) this.ask(asked(event));
    });
    canvas.addEventListener("pointerleave", () => this.tell());
    canvas.addEventListener("click", (event) => {
      viewer.kept = !(viewer.kept && asked(event) === this.query);
      this.ask(asked(event));
    });
    canvas.addEventListener("keydown", (event) => this.step(event));
    this.slider.addEventListener("input", () => viewer.follow(this));
    this.select.addEventListener("change", () => {
      this.use(this.select.value, this.depth);
      viewer.draw();
    });
    this.element.querySelector(".downloads button").addEventListener("click", () => {
      const { name, layers } = this.encoder, head = this.head < 0 ? "mean" : `head${this.head}`;
      Object.assign(document.createElement("a"), { href: canvas.toDataURL(), download: `${name}-${layers[this.layer]}-${head}.png` }).click();
    });
  }
}
