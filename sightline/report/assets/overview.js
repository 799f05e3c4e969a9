// Small pictures: curves over depth in the table and on the way to each analysis.
"use strict";

const Overview = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  function part(tag, attributes) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  const path = (curve, x, y) => curve.map((value, i) => `${i ? "L" : "M"}${x(i / Math.max(1, curve.length - 1)).toFixed(1)} ${y(value).toFixed(1)}`).join("");

  function span(values) {
    const low = Math.min(...values), high = Math.max(...values), room = (high - low || Math.abs(high) || 1) * 0.08;
    return [low - room, high + room];
  }

  // A line in each cell of a column, all on one scale.
  function sparks(table) {
    const rows = [...table.tBodies[0].rows], width = 66, height = 18;
    for (let k = 1; k < table.tHead.rows[0].cells.length; k++) {
      const cells = rows.map((row) => row.cells[k]).filter((cell) => cell.dataset.curve);
      const curves = cells.map((cell) => cell.dataset.curve.split(" ").map(Number));
      if (!curves.length) continue;
      const [low, high] = span(curves.flat()), x = (at) => 2 + at * (width - 4), y = (v) => height - 2 - ((v - low) / (high - low)) * (height - 4);
      cells.forEach((cell, i) => {
        const svg = part("svg", { viewBox: `0 0 ${width} ${height}`, class: "spark", "aria-hidden": "true" });
        svg.append(part("path", { d: path(curves[i], x, y) }), part("circle", { cx: x(1), cy: y(curves[i].at(-1)), r: 1.8 }));
        cell.querySelector(".bar").replaceWith(svg);
      });
    }
  }

  // Curves of all encoders; or a dot for each, in their order, where there is no curve.
  function multiple(place, data) {
    const width = 240, height = 110, names = Encoders.names.filter((name) => name in data.values);
    const svg = part("svg", { viewBox: `0 0 ${width} ${height}` }), marks = [];
    const lines = Object.keys(data.curves).length > 0, values = lines ? Object.values(data.curves).flat() : Object.values(data.values);
    const [low, high] = lines ? span(values) : [Math.min(0, ...values), Math.max(0, ...values) || 1];
    const y = (v) => height - 6 - ((v - low) / (high - low || 1)) * (height - 12);
    if (low < 0 && high > 0) svg.append(part("line", { x1: 4, x2: width - 4, y1: y(0), y2: y(0), class: "zero" }));
    names.forEach((name, i) => {
      const group = part("g", {}), text = part("title", {});
      text.textContent = `${name}: ${data.texts[name]}`;
      group.append(text);
      if (data.curves[name]) {
        const x = (at) => 8 + at * (width - 16);
        group.append(part("path", { d: path(data.curves[name], x, y) }), part("circle", { cx: x(1), cy: y(data.curves[name].at(-1)), r: 3 }));
      } else {
        const step = (width - 16) / names.length, x = 8 + i * step;
        group.append(part("rect", { x: x + 0.15 * step, width: 0.7 * step, y: Math.min(y(0), y(data.values[name])), height: Math.max(1.5, Math.abs(y(0) - y(data.values[name]))), rx: 2 }));
      }
      group.addEventListener("pointerenter", (event) => event.pointerType !== "touch" && Encoders.point(name));
      group.addEventListener("pointerleave", () => Encoders.point(""));
      svg.append(group);
      marks.push([group, name]);
    });
    place.replaceChildren(svg);
    return marks;
  }

  function follow(marks) {
    const draw = () => marks.forEach(([element, name]) => {
      Encoders.mark(element, name);
      element.style.setProperty("--own", Encoders.colour(name));
    });
    Encoders.listen(draw);
    draw();
  }

  function start(page, data) {
    for (const table of page.querySelectorAll(".numbers table")) {
      sparks(table);
      const rows = [...table.tBodies[0].rows].map((row) => [row, Encoders.names[row.dataset.encoder]]);
      for (const [row, name] of rows) {
        Encoders.stands(row, name);
        row.querySelector(".who").addEventListener("click", () => Encoders.only(name));
      }
      follow(rows);
    }
    for (const button of page.querySelectorAll("[data-further]"))
      button.addEventListener("click", () => {
        const open = button.closest(".numbers").classList.toggle("all");
        button.setAttribute("aria-expanded", String(open));
        button.textContent = open ? "The first eight" : button.dataset.further || "All numbers";
      });
    for (const link of page.querySelectorAll("[data-multiple]")) {
      const own = data.multiples?.[link.dataset.multiple];
      if (own) follow(multiple(link.querySelector(".miniature"), own));
      else link.querySelector(".miniature").classList.add("none");
    }
  }

  return { start };
})();
