/**
 * A table that sorts, filters, grows on demand and downloads.
 * columns: {key, label, number, digits, format, text}; rows: objects.
 */
function sortableTable({ name, columns, rows, filters = [], onRow, pageSize = 50, search = false }) {
  const state = { sort: null, descending: false, shown: pageSize, filters: {}, query: "" };
  const body = h("tbody"), foot = h("div", { class: "tablefoot" });
  const cellText = (column, row) => {
    const value = row[column.key];
    if (column.format) return column.format(value, row);
    if (column.number) return column.digits === undefined ? (known(value) ? String(value) : "–") : fixed(value, column.digits);
    return value === null || value === undefined ? "–" : String(value);
  };
  const heads = columns.map(column => {
    const head = h("th", { class: column.number ? "n" : null, scope: "col", title: column.title },
      h("button", { type: "button", onclick: () => {
        state.descending = state.sort === column ? !state.descending : false;
        state.sort = column;
        heads.forEach(other => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
        fill();
      } }, column.label));
    return head;
  });
  function current() {
    let list = rows.filter(row => Object.entries(state.filters).every(([key, value]) => value === "" || String(row[key]) === value));
    if (state.query) list = list.filter(row => columns.some(column => cellText(column, row).toLowerCase().includes(state.query)));
    if (state.sort) {
      const { key } = state.sort, sign = state.descending ? -1 : 1;
      list = [...list].sort((a, b) => {
        const x = a[key], y = b[key];
        if (!known(x) || !known(y)) return known(x) ? -1 : known(y) ? 1 : 0;
        return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
      });
    }
    return list;
  }
  function fill() {
    const list = current(), part = list.slice(0, state.shown);
    body.replaceChildren(...part.map(row => {
      const line = h("tr", onRow ? { class: "pick", tabindex: "0", onclick: () => onRow(row),
        onkeydown: event => { if (event.key === "Enter") onRow(row); } } : {},
        columns.map(column => h("td", { class: column.number ? "n" : column.text ? "text" : null },
          column.node ? column.node(row) : cellText(column, row))));
      return line;
    }));
    const left = list.length - part.length;
    foot.replaceChildren(
      h("span", {}, `${part.length} of ${list.length} rows`),
      ...(left > 0 ? [
        h("button", { type: "button", onclick: () => { state.shown += 200; fill(); } }, `Show ${Math.min(200, left)} more`),
        h("button", { type: "button", onclick: () => { state.shown = Infinity; fill(); } }, "Show all"),
      ] : []),
      h("button", { type: "button", class: "csv", onclick: () => download(name, columns.map(c => c.key), current().map(row => columns.map(c => row[c.key]))) }, "CSV"));
  }
  const controls = h("div", { class: "controls" },
    filters.map(filter => h("label", {}, filter.label + " ",
      h("select", { onchange: event => { state.filters[filter.key] = event.target.value; state.shown = pageSize; fill(); } },
        h("option", { value: "" }, "all"), filter.options.map(o => h("option", { value: o.value }, o.label))))),
    search ? h("label", {}, "Find ", h("input", { type: "search", oninput: event => { state.query = event.target.value.toLowerCase(); fill(); } })) : null);
  fill();
  return h("div", { "data-table": name }, filters.length || search ? controls : null,
    h("div", { class: "tablewrap" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), body)), foot);
}

function kindChip(kinds, kind) {
  const found = kinds.find(k => k.kind === kind);
  return h("span", {}, h("span", { class: "swatch", style: `background:var(--${kind})` }), found ? found.label : kind);
}

function card(name, value, more, unmeasured) {
  return h("div", { class: "card" }, h("div", { class: "name" }, name),
    h("div", { class: unmeasured ? "value unmeasured" : "value" }, value), more ? h("div", { class: "more" }, more) : null);
}
