// svgToPdf(text) -> Uint8Array: one page of vectors with selectable text, for the part of SVG that Vega writes: groups, paths, rects,
// lines, text, clip paths, linear gradients, opacity. Text is set in the Helvetica that every PDF reader has; a string with characters
// that it lacks (Greek, Chinese, …) is drawn as a fine one-colour picture that still carries its text.
"use strict";

const svgToPdf = (() => {
  const WIDTHS = {
    // Advance widths of Helvetica and Helvetica-Bold from space to tilde, in thousandths of the font size.
    F1: "278 278 355 556 556 889 667 191 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 278 278 584 584 584 556 1015 667 667 722 722 667 611 778 722 278 500 667 556 833 722 778 667 778 722 667 611 722 667 944 667 667 611 278 278 278 469 556 333 556 556 500 556 556 278 556 556 222 222 500 222 833 556 556 556 556 333 500 278 556 500 722 500 500 500 334 260 334 584".split(" ").map(Number),
    F2: "278 333 474 556 556 889 722 238 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 333 333 584 584 584 611 975 722 722 722 722 667 611 778 722 278 556 722 611 833 722 778 667 778 722 667 611 722 667 944 667 667 611 333 278 333 584 556 333 556 611 556 611 556 333 611 611 278 278 556 278 889 611 611 611 611 389 556 333 611 556 778 556 556 500 389 280 389 584".split(" ").map(Number),
  };
  const OTHER_WIDTHS = { "–": 556, "—": 1000, "…": 1000, "·": 278, "×": 584, "±": 584, "°": 400, "•": 350, "“": 333, "”": 333, "‘": 222, "’": 222, "µ": 556 };
  const HIGH = "€\0‚ƒ„…†‡ˆ‰Š‹Œ\0Ž\0\0‘’“”•–—˜™š›œ\0žŸ"; // codes 128 to 159 of WinAnsiEncoding
  const n = (x) => String(Math.round(x * 1000) / 1000);
  const list = (text) => (text.match(/[-+]?(?:\d*\.\d+|\d+\.?)(?:[eE][-+]?\d+)?/g) ?? []).map(Number);
  const painter = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

  function code(char) {
    const point = char.codePointAt(0);
    if ((point >= 32 && point < 127) || (point >= 160 && point < 256)) return point;
    if (char === "−") return 45;
    const high = HIGH.indexOf(char);
    return high >= 0 && char !== "\0" ? 128 + high : null;
  }

  function advance(char, font) {
    const plain = char === "−" ? "-" : char.normalize("NFD")[0], table = WIDTHS[font];
    return table[plain.codePointAt(0) - 32] ?? OTHER_WIDTHS[char] ?? 556;
  }

  function colour(text) {
    painter.fillStyle = "#000";
    painter.fillStyle = text;
    const shown = painter.fillStyle;
    if (shown.startsWith("#")) return { rgb: [1, 3, 5].map((i) => parseInt(shown.slice(i, i + 2), 16) / 255), alpha: 1 };
    const [r, g, b, alpha] = list(shown);
    return { rgb: [r / 255, g / 255, b / 255], alpha };
  }

  function matrix(text) {
    let m = [1, 0, 0, 1, 0, 0];
    const times = ([a, b, c, d, e, f]) => {
      const [A, B, C, D, E, F] = m;
      m = [A * a + C * b, B * a + D * b, A * c + C * d, B * c + D * d, A * e + C * f + E, B * e + D * f + F];
    };
    for (const [, kind, inside] of (text ?? "").matchAll(/(\w+)\(([^)]*)\)/g)) {
      const v = list(inside);
      if (kind === "translate") times([1, 0, 0, 1, v[0], v[1] ?? 0]);
      else if (kind === "scale") times([v[0], 0, 0, v[1] ?? v[0], 0, 0]);
      else if (kind === "matrix") times(v);
      else if (kind === "rotate") {
        const turn = (v[0] * Math.PI) / 180, cos = Math.cos(turn), sin = Math.sin(turn);
        times([1, 0, 0, 1, v[1] ?? 0, v[2] ?? 0]);
        times([cos, sin, -sin, cos, 0, 0]);
        times([1, 0, 0, 1, -(v[1] ?? 0), -(v[2] ?? 0)]);
      }
    }
    return m;
  }

  // An elliptical arc as cubic Bézier curves of at most a quarter turn each (end point to centre form, SVG 1.1 appendix F.6).
  function arc(x1, y1, rx, ry, tilt, large, sweep, x2, y2) {
    if (!rx || !ry || (x1 === x2 && y1 === y2)) return [["L", x2, y2]];
    const phi = (tilt * Math.PI) / 180, cos = Math.cos(phi), sin = Math.sin(phi);
    const dx = (x1 - x2) / 2, dy = (y1 - y2) / 2, px = cos * dx + sin * dy, py = cos * dy - sin * dx;
    [rx, ry] = [Math.abs(rx), Math.abs(ry)];
    const grow = Math.sqrt(Math.max(1, (px / rx) ** 2 + (py / ry) ** 2));
    [rx, ry] = [rx * grow, ry * grow];
    const below = (rx * py) ** 2 + (ry * px) ** 2;
    const k = Math.sqrt(Math.max(0, (rx * ry) ** 2 / below - 1)) * (large === sweep ? -1 : 1);
    const cx = (k * rx * py) / ry, cy = (-k * ry * px) / rx;
    const from = Math.atan2((py - cy) / ry, (px - cx) / rx);
    let span = Math.atan2((-py - cy) / ry, (-px - cx) / rx) - from;
    if (sweep && span < 0) span += 2 * Math.PI;
    if (!sweep && span > 0) span -= 2 * Math.PI;
    const pieces = Math.ceil(Math.abs(span) / (Math.PI / 2) - 1e-9), each = span / pieces, pull = (4 / 3) * Math.tan(each / 4);
    const mx = (x1 + x2) / 2, my = (y1 + y2) / 2;
    const place = (x, y) => [cos * (rx * x + cx) - sin * (ry * y + cy) + mx, sin * (rx * x + cx) + cos * (ry * y + cy) + my];
    return Array.from({ length: pieces }, (_, i) => {
      const s = from + i * each, e = s + each, [cs, ss, ce, se] = [Math.cos(s), Math.sin(s), Math.cos(e), Math.sin(e)];
      return ["C", ...place(cs - pull * ss, ss + pull * cs), ...place(ce + pull * se, se - pull * ce), ...place(ce, se)];
    });
  }

  // Path data as absolute M, L, C and Z.
  function segments(d) {
    const out = [], COUNT = { M: 2, L: 2, H: 1, V: 1, C: 6, S: 4, Q: 4, T: 2, A: 7, Z: 0 };
    let x = 0, y = 0, startX = 0, startY = 0, controlX = 0, controlY = 0, before = "";
    const cubic = (a, b, c, e, f, g) => { out.push(["C", a, b, c, e, f, g]); [controlX, controlY, x, y] = [c, e, f, g]; };
    for (const [, letter, rest] of d.matchAll(/([a-zA-Z])([^a-zA-Z]*(?:[eE][-+]?\d[^a-zA-Z]*)*)/g)) {
      // Flags of an arc may be written without a space after them; Vega writes commas.
      const kind = letter.toUpperCase(), relative = letter !== kind, v = list(rest), count = COUNT[kind];
      for (let at = 0; at === 0 || (count && at < v.length); at += count || 1) {
        let p = v.slice(at, at + count);
        if (relative) p = p.map((value, i) => value + (kind === "H" ? x : kind === "V" ? y : kind === "A" ? (i === 5 ? x : i === 6 ? y : 0) : i % 2 ? y : x));
        if (kind === "M" && at === 0) { [x, y] = p; [startX, startY] = p; out.push(["M", x, y]); }
        else if (kind === "M" || kind === "L") { [x, y] = p; out.push(["L", x, y]); }
        else if (kind === "H") { x = p[0]; out.push(["L", x, y]); }
        else if (kind === "V") { y = p[0]; out.push(["L", x, y]); }
        else if (kind === "C") cubic(...p);
        else if (kind === "S") cubic(...("CS".includes(before) && before ? [2 * x - controlX, 2 * y - controlY] : [x, y]), ...p);
        else if (kind === "Q" || kind === "T") {
          const [qx, qy] = kind === "Q" ? p : "QT".includes(before) && before ? [2 * x - controlX, 2 * y - controlY] : [x, y];
          const [ex, ey] = p.slice(-2);
          cubic(x + (2 / 3) * (qx - x), y + (2 / 3) * (qy - y), ex + (2 / 3) * (qx - ex), ey + (2 / 3) * (qy - ey), ex, ey);
          [controlX, controlY] = [qx, qy];
        } else if (kind === "A") { out.push(...arc(x, y, ...p)); [x, y] = p.slice(-2); }
        else if (kind === "Z") { [x, y] = [startX, startY]; out.push(["Z"]); }
        before = kind;
      }
    }
    return out;
  }

  function shapeOf(node) {
    const v = (name) => Number.parseFloat(node.getAttribute(name) ?? 0);
    if (node.nodeName === "path") return segments(node.getAttribute("d") ?? "");
    if (node.nodeName === "line") return [["M", v("x1"), v("y1")], ["L", v("x2"), v("y2")]];
    if (node.nodeName === "rect") {
      const [x, y, w, h] = [v("x"), v("y"), v("width"), v("height")];
      return [["M", x, y], ["L", x + w, y], ["L", x + w, y + h], ["L", x, y + h], ["Z"]];
    }
    if (node.nodeName === "circle") {
      const [x, y, r] = [v("cx"), v("cy"), v("r")];
      return [["M", x - r, y], ...arc(x - r, y, r, r, 0, 0, 1, x + r, y), ...arc(x + r, y, r, r, 0, 0, 1, x - r, y), ["Z"]];
    }
    return null;
  }

  const OPERATOR = { M: "m", L: "l", C: "c", Z: "h" };
  const pathOps = (shape) => shape.map(([kind, ...v]) => [...v.map(n), OPERATOR[kind]].join(" ")).join("\n");

  class Writer {
    constructor(doc) {
      this.doc = doc;
      this.out = [];
      this.states = new Map();
      this.images = [];
      this.shadings = [];
    }

    opacity(fill, stroke) {
      const key = `${n(fill)} ${n(stroke)}`;
      if (!this.states.has(key)) this.states.set(key, `G${this.states.size}`);
      return `/${this.states.get(key)} gs`;
    }

    walk(node, inherited) {
      if (node.nodeType !== 1 || node.nodeName === "defs" || node.nodeName === "title") return;
      const style = { ...inherited };
      const own = (name) => node.style?.getPropertyValue(name) || node.getAttribute(name);
      for (const name of Object.keys(style)) {
        const value = own(name);
        if (value !== null && value !== "" && name !== "opacity") style[name] = value;
      }
      style.opacity = inherited.opacity * Number(own("opacity") || 1);
      if (own("display") === "none" || own("visibility") === "hidden") return;
      this.out.push("q");
      const moved = node.getAttribute("transform");
      if (moved) this.out.push(`${matrix(moved).map(n).join(" ")} cm`);
      const clip = this.linked(own("clip-path"));
      if (clip) this.out.push(pathOps([...clip.children].flatMap((child) => shapeOf(child) ?? [])), "W n");
      if (node.nodeName === "text") this.text(node, style);
      else {
        const shape = shapeOf(node);
        if (shape?.length) this.paint(shape, style);
        else for (const child of node.children) this.walk(child, style);
      }
      this.out.push("Q");
    }

    linked(value) {
      const id = /url\(["']?#([^"')]+)/.exec(value ?? "")?.[1];
      return id ? this.doc.querySelector(`[id="${CSS.escape(id)}"]`) : null;
    }

    paint(shape, style) {
      const gradient = this.linked(style.fill), solid = style.fill !== "none" && style.fill !== "transparent" && !gradient;
      const lined = style.stroke !== "none" && style.stroke !== "transparent" && Number.parseFloat(style["stroke-width"]) > 0;
      if (gradient) this.shade(gradient, shape);
      if (!solid && !lined) return;
      const fill = solid ? colour(style.fill) : null, stroke = lined ? colour(style.stroke) : null;
      const strength = [fill, stroke].map((c, i) => (c ? c.alpha : 1) * style.opacity * Number(style[i ? "stroke-opacity" : "fill-opacity"]));
      if (strength.every((s) => s === 0)) return;
      this.out.push(this.opacity(...strength));
      if (fill) this.out.push(`${fill.rgb.map(n).join(" ")} rg`);
      if (stroke) {
        const dash = style["stroke-dasharray"] === "none" ? [] : list(style["stroke-dasharray"]);
        this.out.push(`${stroke.rgb.map(n).join(" ")} RG ${n(Number.parseFloat(style["stroke-width"]))} w [${dash.map(n).join(" ")}] 0 d`);
        this.out.push(`${{ butt: 0, round: 1, square: 2 }[style["stroke-linecap"]] ?? 0} J ${{ miter: 0, round: 1, bevel: 2 }[style["stroke-linejoin"]] ?? 0} j`);
      }
      this.out.push(pathOps(shape), fill && stroke ? "B" : fill ? "f" : "S");
    }

    shade(gradient, shape) {
      const points = shape.flatMap(([, ...v]) => v), xs = points.filter((_, i) => i % 2 === 0), ys = points.filter((_, i) => i % 2);
      const [left, top] = [Math.min(...xs), Math.min(...ys)], [width, height] = [Math.max(...xs) - left, Math.max(...ys) - top];
      const part = (name, other) => Number.parseFloat(gradient.getAttribute(name) ?? other) / ((gradient.getAttribute(name) ?? "").endsWith("%") ? 100 : 1);
      const ends = [left + part("x1", 0) * width, top + part("y1", 0) * height, left + part("x2", 1) * width, top + part("y2", 0) * height];
      const stops = [...gradient.children].map((stop) => [Number.parseFloat(stop.getAttribute("offset")) / (stop.getAttribute("offset").endsWith("%") ? 100 : 1), colour(stop.getAttribute("stop-color")).rgb]);
      if (stops.length < 2) return;
      const piece = ([, from], [, to]) => `<< /FunctionType 2 /Domain [0 1] /N 1 /C0 [${from.map(n).join(" ")}] /C1 [${to.map(n).join(" ")}] >>`;
      const pieces = stops.slice(1).map((stop, i) => piece(stops[i], stop));
      const whole = `<< /FunctionType 3 /Domain [0 1] /Functions [${pieces.join(" ")}] /Bounds [${stops.slice(1, -1).map(([at]) => n(at)).join(" ")}] /Encode [${pieces.map(() => "0 1").join(" ")}] >>`;
      this.shadings.push(`<< /ShadingType 2 /ColorSpace /DeviceRGB /Extend [true true] /Coords [${ends.map(n).join(" ")}] /Function ${whole} >>`);
      this.out.push("q", pathOps(shape), `W n /S${this.shadings.length - 1} sh`, "Q");
    }

    text(node, style) {
      const spans = [...node.children].filter((child) => child.nodeName === "tspan");
      let y = 0;
      for (const span of spans.length ? spans : [node]) {
        y += Number.parseFloat(span === node ? 0 : (span.getAttribute("dy") ?? 0));
        this.string(span.textContent, y, style);
      }
    }

    string(text, y, style) {
      const size = Number.parseFloat(style["font-size"]), weight = style["font-weight"], paint = colour(style.fill);
      if (!text.trim() || style.fill === "none") return;
      this.out.push(this.opacity(paint.alpha * style.opacity * Number(style["fill-opacity"]), 1), `${paint.rgb.map(n).join(" ")} rg`);
      const chars = [...text.replace(/[\s\p{Cc}]/gu, " ")], codes = chars.map(code), font = weight === "bold" || Number(weight) >= 600 ? "F2" : "F1";
      const share = { middle: 0.5, end: 1 }[style["text-anchor"]] ?? 0;
      if (codes.includes(null)) return this.picture(text, y, style, size, share);
      const width = (chars.reduce((sum, char) => sum + advance(char, font), 0) * size) / 1000;
      const hex = codes.map((c) => c.toString(16).padStart(2, "0")).join("");
      this.out.push(`BT /${font} ${n(size)} Tf 1 0 0 -1 ${n(-share * width)} ${n(y)} Tm <${hex}> Tj ET`);
    }

    picture(text, y, style, size, share) {
      const zoom = 6, font = `${style["font-weight"]} ${size * zoom}px ${style["font-family"]}`;
      painter.font = font;
      const width = Math.ceil(painter.measureText(text).width) + 2 * zoom, height = Math.ceil(size * zoom * 1.5), rise = Math.ceil(size * zoom * 1.1);
      painter.canvas.width = width;
      painter.canvas.height = height;
      painter.font = font;
      painter.fillText(text, zoom, rise);
      const pixels = painter.getImageData(0, 0, width, height).data, stride = Math.ceil(width / 8), bits = new Uint8Array(stride * height);
      for (let i = 0; i < width * height; i++) if (pixels[4 * i + 3] > 127) bits[Math.floor(i / width) * stride + ((i % width) >> 3)] |= 128 >> (i % width & 7);
      this.images.push({ width, height, hex: Array.from(bits, (b) => b.toString(16).padStart(2, "0")).join("") });
      const said = text.split("").map((c) => c.charCodeAt(0).toString(16).padStart(4, "0")).join("");
      const left = -1 - share * (width / zoom - 2), bottom = y + (height - rise) / zoom;
      this.out.push(`/Span << /ActualText <feff${said}> >> BDC q ${n(width / zoom)} 0 0 ${n(-height / zoom)} ${n(left)} ${n(bottom)} cm /I${this.images.length - 1} Do Q EMC`);
    }
  }

  function file(writer, width, height) {
    const named = (prefix, items, first) => items.map((_, i) => `/${prefix}${i} ${first + i} 0 R`).join(" ");
    const content = `q 0.75 0 0 -0.75 0 ${n(height * 0.75)} cm\n${writer.out.join("\n")}\nQ`;
    const shadings = writer.shadings, images = writer.images, states = [...writer.states].map(([key]) => key.split(" "));
    const font = (name) => `<< /Type /Font /Subtype /Type1 /BaseFont /${name} /Encoding /WinAnsiEncoding >>`;
    const first = 7; // objects 1 to 6 are the catalogue, the pages, the page, its content and the two fonts
    const objects = [
      "<< /Type /Catalog /Pages 2 0 R >>",
      "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
      `<< /Type /Page /Parent 2 0 R /MediaBox [0 0 ${n(width * 0.75)} ${n(height * 0.75)}] /Contents 4 0 R /Resources << /Font << /F1 5 0 R /F2 6 0 R >>` +
        ` /ExtGState << ${named("G", states, first)} >> /Shading << ${named("S", shadings, first + states.length)} >>` +
        ` /XObject << ${named("I", images, first + states.length + shadings.length)} >> >> >>`,
      `<< /Length ${content.length} >>\nstream\n${content}\nendstream`,
      font("Helvetica"),
      font("Helvetica-Bold"),
      ...states.map(([fill, stroke]) => `<< /Type /ExtGState /ca ${fill} /CA ${stroke} >>`),
      ...shadings,
      ...images.map((i) => `<< /Type /XObject /Subtype /Image /ImageMask true /Decode [1 0] /BitsPerComponent 1 /Width ${i.width} /Height ${i.height} /Filter /ASCIIHexDecode /Length ${i.hex.length + 1} >>\nstream\n${i.hex}>\nendstream`),
      "<< /Producer (Sightline) >>",
    ];
    let text = "%PDF-1.4\n";
    const starts = objects.map((object, i) => {
      const at = text.length;
      text += `${i + 1} 0 obj\n${object}\nendobj\n`;
      return at;
    });
    const table = starts.map((at) => `${String(at).padStart(10, "0")} 00000 n \n`).join("");
    text += `xref\n0 ${objects.length + 1}\n0000000000 65535 f \n${table}trailer\n<< /Size ${objects.length + 1} /Root 1 0 R /Info ${objects.length} 0 R >>\nstartxref\n${text.length}\n%%EOF\n`;
    return Uint8Array.from(text, (char) => char.charCodeAt(0)); // all of it is ASCII
  }

  return (svgText) => {
    const root = new DOMParser().parseFromString(svgText, "image/svg+xml").documentElement;
    if (root.nodeName !== "svg") throw new Error("The chart gave no valid SVG");
    const writer = new Writer(root);
    const start = {
      fill: "#000", stroke: "none", "stroke-width": "1", "stroke-dasharray": "none", "stroke-linecap": "butt", "stroke-linejoin": "miter", "fill-opacity": "1",
      "stroke-opacity": "1", opacity: 1, "font-family": "sans-serif", "font-size": "11px", "font-weight": "normal", "text-anchor": "start",
    };
    for (const child of root.children) writer.walk(child, start);
    return file(writer, Number.parseFloat(root.getAttribute("width")), Number.parseFloat(root.getAttribute("height")));
  };
})();
