// Which encoders the reader sees, and which one is pointed at: one choice for the whole report.
"use strict";

const Encoders = (() => {
  const all = Data.common.encoders, names = all.map((encoder) => encoder.name), hidden = new Set(), told = [];
  let pointed = "", waiting = 0;

  const colour = (name) => all[names.indexOf(name)]?.[document.documentElement.classList.contains("dark") ? "dark" : "light"] ?? "currentColor";
  const visible = (name) => !hidden.has(name);

  function tell() {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => told.forEach((act) => act()));
  }

  function point(name) {
    if (name === pointed) return;
    pointed = name;
    tell();
  }

  function toggle(name) {
    if (!hidden.delete(name)) hidden.add(name);
    if (hidden.size === names.length) hidden.clear(); // nobody left: everybody is back
    tell();
  }

  // This one alone; and all again when it is alone already.
  function only(name) {
    const alone = visible(name) && hidden.size === names.length - 1;
    hidden.clear();
    if (!alone) names.filter((other) => other !== name).forEach((other) => hidden.add(other));
    tell();
  }

  function everyone() {
    hidden.clear();
    tell();
  }

  // An element that stands for an encoder: pointing at it points at the encoder everywhere.
  function stands(element, name) {
    element.addEventListener("pointerenter", (event) => event.pointerType !== "touch" && point(name));
    element.addEventListener("pointerleave", () => point(""));
    element.addEventListener("focusin", () => point(name));
    element.addEventListener("focusout", () => point(""));
  }

  function mark(element, name) {
    element.classList.toggle("gone", !visible(name));
    element.classList.toggle("faint", pointed !== "" && pointed !== name);
    element.classList.toggle("pointed", pointed === name);
  }

  function legend(place, those) {
    const entries = names.filter((name) => those.has(name)).map((name) => {
      const entry = document.createElement("button"), swatch = document.createElement("span"), text = document.createElement("span");
      entry.type = "button";
      swatch.className = "swatch";
      text.className = "name";
      text.textContent = name;
      entry.title = `${name}: click to see it alone`;
      entry.append(swatch, text);
      entry.addEventListener("click", () => only(name));
      stands(entry, name);
      return [entry, swatch, name];
    });
    place.replaceChildren(...entries.map(([entry]) => entry));
    const draw = () => entries.forEach(([entry, swatch, name]) => {
      mark(entry, name);
      swatch.style.background = colour(name);
      entry.setAttribute("aria-pressed", String(visible(name)));
    });
    told.push(draw);
    draw();
  }

  function chooser() {
    const rows = [...document.querySelectorAll(".chooser li")], button = document.getElementById("everyone");
    rows.forEach((row, i) => {
      row.querySelector("input").addEventListener("change", () => toggle(names[i]));
      row.querySelector(".only").addEventListener("click", () => only(names[i]));
      stands(row, names[i]);
    });
    button?.addEventListener("click", everyone);
    told.push(() => {
      rows.forEach((row, i) => {
        row.querySelector("input").checked = visible(names[i]);
        mark(row, names[i]);
      });
      if (button) button.hidden = hidden.size === 0;
    });
  }

  chooser();
  return {
    names, colour, visible, point, only, toggle, everyone, stands, mark, legend, tell,
    get pointed() { return pointed; }, get hidden() { return [...hidden]; }, listen: (act) => told.push(act),
  };
})();
