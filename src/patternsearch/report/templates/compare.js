// Assembly of the page that compares two configs.

const CHANGE_COLORS = { same: "--empty", numbers: "--dense", budget: "--vertical_slash", pattern: "--a_shape" };
const CHANGE_LABELS = { same: "same", numbers: "other numbers", budget: "other budget", pattern: "other kind" };

function compareRows(data) {
  const maps = data.maps, [a, b] = maps.sides, stale = new Set(data.stale.map(String)), rows = [];
  for (let layer = 0; layer < maps.num_layers; layer++) for (let head = 0; head < maps.num_heads; head++) {
    const what = data.changes[maps.what.at(layer, head)];
    if (what === "same") continue;
    const name = side => { const p = side.pattern.at(layer, head); return Number.isNaN(p) ? "none" : side.names[p]; };
    const pair = key => a[key] && b[key] ? [a[key].at(layer, head), b[key].at(layer, head)] : [NaN, NaN];
    const [ma, mb] = pair("mass_worst_region"), [da, db] = pair("density"), [ta, tb] = pair("predicted_ms");
    rows.push({ layer, head, what, a: name(a), b: name(b), mass_a: ma, mass_b: mb, mass_change: mb - ma, density_a: da, density_b: db, density_change: db - da, ms_a: ta, ms_b: tb, stale: stale.has(String([layer, head])) ? "stale" : "" });
  }
  return rows;
}

function build_compare(data, main) {
  const mounts = [];
  const at = known(data.length) ? ` at ${tokens(data.length)}` : "";
  main.append(h("section", {}, h("dl", {}, h("dt", {}, "A"), h("dd", {}, `${data.a.name} (${data.a.kind}, ${data.a.file_sha256.slice(0, 12)})`), h("dt", {}, "B"), h("dd", {}, `${data.b.name} (${data.b.kind}, ${data.b.file_sha256.slice(0, 12)})`))));
  main.append(...data.notes.map(note => h("p", { class: "note" }, note)));
  if (!data.differs.any) main.append(h("p", {}, "No differences."));
  const change = (x, y, digits) => known(x) && known(y) ? `${fixed(x, digits)} → ${fixed(y, digits)}` : "not known in both";
  const [ta, tb] = [data.totals.a, data.totals.b];
  main.append(h("div", { class: "cards" },
    card("heads of another kind", String(data.heads.pattern)), card("heads of another budget", String(data.heads.budget)), card("heads with other numbers", String(data.heads.numbers)),
    card("density" + at, change(ta.density, tb.density)), card("worst-region mass, mean" + at, data.scores.comparable ? change(ta.score, tb.score, 4) : "not comparable"),
    known(ta.predicted_ms) && known(tb.predicted_ms) ? card("predicted attention" + at, `${ms(ta.predicted_ms)} → ${ms(tb.predicted_ms)}`) : card("predicted attention", "not measured", "in one of the two or both", true)));

  const maps = data.maps;
  if (maps) {
    const [a, b] = maps.sides;
    const delta = key => (l, i) => a[key] && b[key] ? b[key].at(l, i) - a[key].at(l, i) : NaN;
    const has = key => Boolean(a[key] && b[key]) && range(maps.num_layers).some(l => range(maps.num_heads).some(i => known(delta(key)(l, i))));
    const kindClasses = () => data.kinds.map(k => ({ label: k.label, color: () => kindColor(k.kind), variable: "--" + k.kind }));
    const metrics = [
      { value: "what", label: "Change", cell: (l, i) => maps.what.at(l, i), csv: (l, i) => data.changes[maps.what.at(l, i)], classes: data.changes.map(c => ({ label: CHANGE_LABELS[c], color: () => style(CHANGE_COLORS[c]), variable: CHANGE_COLORS[c] })), caption: "What sort of change each head saw." },
      { value: "kind_a", label: "Kind in A", cell: (l, i) => a.kind.at(l, i), classes: kindClasses(), letters: ["D", "A", "V", "B"], caption: "Kinds in A." },
      { value: "kind_b", label: "Kind in B", cell: (l, i) => b.kind.at(l, i), classes: kindClasses(), letters: ["D", "A", "V", "B"], caption: "Kinds in B." },
      { value: "mass", label: "Mass B − A", cell: delta("mass_worst_region"), disabled: !has("mass_worst_region"), title: has("mass_worst_region") ? null : "the scores of the two cannot be compared", diverging: true, caption: "Worst-region mass, B − A" + at + "." },
      { value: "density", label: "Density B − A", cell: delta("density"), disabled: !has("density"), diverging: true, reverse: true, caption: "Density, B − A" + at + ". Blue: B reads less." },
      { value: "ms", label: "Time B − A", cell: delta("predicted_ms"), disabled: !has("predicted_ms"), title: has("predicted_ms") ? null : "not measured in one of the two", diverging: true, reverse: true, caption: "Predicted ms, B − A" + at + ". Blue: B is faster." },
    ];
    const hover = (l, i) => {
      const name = side => { const p = side.pattern.at(l, i); return Number.isNaN(p) ? "none" : plain(side.names[p]); };
      return `layer ${l}, head ${i}: ${CHANGE_LABELS[data.changes[maps.what.at(l, i)]]}<br>A ${name(a)}<br>B ${name(b)}`;
    };
    const map = headMap({ numLayers: maps.num_layers, numHeads: maps.num_heads, metrics, first: "what", title: "Layers × heads", name: "compare-map", hover });
    mounts.push(map);
    main.append(h("section", { id: "map" }, h("h2", {}, "Heads"), map.root));
  }
  const kinds = figure({
    title: "Heads by kind", name: "compare-kinds", height: 280, caption: "", csv: () => ({ header: ["kind", "a", "b"], rows: data.kinds.map(k => [k.kind, ta.kinds[k.kind] || 0, tb.kinds[k.kind] || 0]) }),
    draw: () => ({ data: [["A", ta, "--dense"], ["B", tb, "--accent"]].map(([name, t, color]) => ({ type: "bar", name, x: data.kinds.map(k => k.label), y: data.kinds.map(k => t.kinds[k.kind] || 0), marker: { color: style(color) }, hovertemplate: "%{x}: %{y} heads<extra>" + name + "</extra>" })), layout: { barmode: "group", yaxis: { title: { text: "heads" } } } }),
  });
  const layers = data.layers;
  const bars = figure({
    title: "Heads that changed, by layer", name: "compare-layers", height: 280, caption: "",
    csv: () => ({ header: ["layer", "pattern", "budget", "numbers", "stale", "density_a", "density_b", "ms_a", "ms_b"], rows: layers.map(l => [l.layer, l.pattern, l.budget, l.numbers, l.stale, l.a.density, l.b.density, l.a.predicted_ms, l.b.predicted_ms]) }),
    draw: () => ({ data: ["pattern", "budget", "numbers"].map(what => ({ type: "bar", name: CHANGE_LABELS[what], x: layers.map(l => l.layer), y: layers.map(l => l[what]), marker: { color: style(CHANGE_COLORS[what]) }, hovertemplate: "layer %{x}: %{y} heads<extra>" + CHANGE_LABELS[what] + "</extra>" })), layout: { barmode: "stack", xaxis: { title: { text: "layer" } }, yaxis: { title: { text: "heads" } } } }),
  });
  mounts.push(kinds, ...(layers.length ? [bars] : []));
  main.append(h("section", {}, h("h2", {}, "Whole model"), h("div", { class: "grid" }, kinds.root, layers.length ? bars.root : null)));
  if (data.fields.length) main.append(h("section", { id: "fields" }, h("h2", {}, "What they are bound to and how they were made"),
    sortableTable({ name: "fields", rows: data.fields, columns: [{ key: "part", label: "part" }, { key: "field", label: "field" }, { key: "a", label: "A", text: true }, { key: "b", label: "B", text: true }] })));
  if (maps) {
    const number = (key, label) => ({ key, label, number: true, digits: 4 });
    main.append(h("section", { id: "heads" }, h("h2", {}, "Heads that differ"), sortableTable({ name: "changes", rows: compareRows(data), search: true,
      filters: [{ key: "what", label: "Change", options: data.changes.slice(1).map(c => ({ value: c, label: CHANGE_LABELS[c] })) }],
      columns: [{ key: "layer", label: "layer", number: true }, { key: "head", label: "head", number: true }, { key: "what", label: "change", format: v => CHANGE_LABELS[v] }, { key: "a", label: "A" }, { key: "b", label: "B" }, number("mass_a", "mass A"), number("mass_b", "mass B"), number("mass_change", "B − A"), number("density_a", "density A"), number("density_b", "density B"), { key: "stale", label: "stale" }] })));
  }
  mountAll(mounts);
}
