// Tables that are sorted by a click on a heading, and the list of findings with its filters.
"use strict";

const Tables = (() => {
  const number = (cell) => (cell.dataset.value === undefined ? null : Number(cell.dataset.value));

  function sort(table, column, down) {
    const rows = [...table.tBodies[0].rows], words = column === 0;
    const key = (row) => (words ? row.cells[0].textContent.trim() : number(row.cells[column]));
    rows.sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === null || y === null) return (x === null) - (y === null); // what is missing comes last
      return (words ? x.localeCompare(y) : x - y) * (down ? -1 : 1);
    });
    table.tBodies[0].append(...rows);
  }

  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) =>
      head.querySelector("button").addEventListener("click", () => {
        const before = head.getAttribute("aria-sort"), down = before ? before === "ascending" : column > 0; // numbers begin with the highest
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        sort(table, column, down);
      }),
    );
  }

  function findings(place) {
    const all = [...place.querySelectorAll(".finding")], list = place.querySelector(".finding-list"), told = place.querySelector(".shown");
    const ranks = ["holds", "fails", "unclear", "not measured"];
    const keys = {
      id: (one) => Number(one.dataset.id),
      verdict: (one) => ranks.indexOf(one.dataset.verdict) * 1e4 + Number(one.dataset.id),
      size: (one) => (one.dataset.size === "" ? Infinity : -Math.abs(Number(one.dataset.size))),
    };
    const pick = (name) => place.querySelector(`select[name=${name}]`)?.value ?? "";
    function show() {
      const [paper, verdict, role] = ["paper", "verdict", "role"].map(pick), key = keys[pick("order")];
      let count = 0;
      for (const one of all) {
        const fits = (!paper || one.dataset.paper === paper) && (!verdict || one.dataset.verdict === verdict) && (!role || one.dataset.roles.split("|").includes(role));
        one.hidden = !fits;
        count += fits;
      }
      list.append(...all.toSorted((a, b) => key(a) - key(b)));
      told.textContent = count === all.length ? `${all.length} findings` : `${count} of ${all.length} findings`;
    }
    for (const select of place.querySelectorAll("select")) select.addEventListener("change", show);
    show();
  }

  return { sortable, findings };
})();
