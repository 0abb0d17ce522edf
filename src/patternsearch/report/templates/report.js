// Assembly of the report page.

function headRows(model, margin) {
  const last = model.lengths.length - 1, rows = [];
  for (let layer = 0; layer < model.num_layers; layer++) for (let head = 0; head < model.num_heads; head++) {
    const choice = model.choice.at(layer, head);
    if (Number.isNaN(choice)) continue;
    const pattern = model.patterns[choice], second = model.runner_up.pattern.at(layer, head);
    const worst = last >= 0 ? Math.min(...model.lengths.map((_, k) => model.at.mass_worst_region.at(k, layer, head))) : NaN;
    const value = key => last >= 0 ? model.at[key].at(last, layer, head) : NaN;
    rows.push({
      layer, head, kind: pattern.kind, pattern: pattern.short, worst, mean: value("mass_mean"), heldout: value("heldout_worst_region"), density: value("density"),
      ms: value("predicted_ms"), gap: last >= 0 ? model.oracle_gap.at(last, layer, head) : NaN, margin: margin(layer, head),
      runner_up: Number.isNaN(second) ? null : model.patterns[second].short, score: model.file_score ? model.file_score.values.at(layer, head) : NaN,
    });
  }
  return rows;
}

/**
 * How much more the runner-up costs at the longest length, as a fraction of the chosen pattern, by
 * what the selection compared: time, else executed pairs (from the scores), else density.
 */
function runnerUpMargin(model, scores) {
  const last = model.lengths.length - 1;
  const ratio = (mine, other) => known(mine) && known(other) && mine > 0 ? other / mine - 1 : NaN;
  const second = (layer, head) => last < 0 ? NaN : model.runner_up.pattern.at(layer, head);
  if (model.measured || !scores) {
    const key = model.measured ? "predicted_ms" : "density";
    return { noun: model.measured ? "time" : "density (not measured)",
      of: (layer, head) => Number.isNaN(second(layer, head)) ? NaN : ratio(model.at[key].at(last, layer, head), model.runner_up[key].at(layer, head)) };
  }
  const places = new Map(scores.candidates.map((candidate, c) => [candidate.name, c])), layers = new Map(scores.layers.map((layer, place) => [layer, place]));
  return { noun: scores.unit === "ms" ? "time" : "executed pairs (counted, not measured)", of: (layer, head) => {
    const place = layers.get(layer), other = second(layer, head);
    if (place === undefined || Number.isNaN(other)) return NaN;
    const cost = c => known(c) && c >= 0 ? scores.cost.at(scores.lengths.length - 1, place, head, c) : NaN;
    return ratio(cost(scores.chosen.at(place, head)), cost(places.get(model.patterns[other].name)));
  } };
}

function mapMetrics(model, margin) {
  let k = model.lengths.length - 1;
  const at = key => (l, i) => k < 0 ? NaN : model.at[key].at(k, l, i);
  const none = k < 0, noTime = !model.measured, gapKnown = !none && model.oracle_gap.data.some(v => !Number.isNaN(v));
  const kindOf = (l, i) => { const c = model.choice.at(l, i); return Number.isNaN(c) ? NaN : model.kinds.findIndex(x => x.kind === model.patterns[c].kind); };
  const metrics = [
    { value: "kind", label: "Kind", cell: kindOf, csv: (l, i) => { const p = kindOf(l, i); return Number.isNaN(p) ? "" : model.kinds[p].kind; }, letters: ["D", "A", "V", "B"],
      classes: model.kinds.map(x => ({ label: `${x.label} ${model.totals.kinds[x.kind] || 0}`, color: () => kindColor(x.kind), variable: "--" + x.kind })), caption: "Which shape each head runs. Click a cell to open the head." },
    { value: "mass_mean", label: "Mean mass", cell: at("mass_mean"), disabled: none, top: 1, caption: "Mean captured mass over calibration samples." },
    { value: "mass_worst", label: "Worst mass", cell: at("mass_worst_region"), disabled: none, top: 1, caption: "Captured mass on the worst sample and region." },
    { value: "heldout", label: "Held-out", cell: at("heldout_worst_region"), disabled: none || !model.at.heldout_worst_region.data.some(v => !Number.isNaN(v)), top: 1, caption: "Worst sample and region of the held-out samples." },
    { value: "density", label: "Density", cell: at("density"), disabled: none, reverse: true, caption: "Causal pairs read / all causal pairs." },
    { value: "predicted_ms", label: "Time", cell: at("predicted_ms"), disabled: none || noTime, title: noTime ? "not measured: select with a timing table" : null, reverse: true, caption: "Predicted milliseconds of the head's attention, index included." },
    { value: "oracle_gap", label: "Oracle gap", cell: (l, i) => k < 0 ? NaN : model.oracle_gap.at(k, l, i), disabled: !gapKnown, title: gapKnown ? null : "no oracle index was scored: calibrate with --oracle", reverse: true, caption: "Oracle − online mass: what the estimator loses." },
    { value: "margin", label: "Runner-up", cell: (l, i) => margin.of(l, i), column: "runner_up_margin", disabled: none, tickformat: ".0%", caption: `How much more the runner-up costs at the longest length, in ${margin.noun}. Near zero: the choice is close.` },
  ];
  if (model.file_score) metrics.push({ value: "file_score", label: "File score", cell: (l, i) => model.file_score.values.at(l, i), caption: `Score in the imported file: ${model.file_score.kind.replace("_", " ")}. Not measured by patternsearch.` });
  return { metrics, setLength: value => { k = value; } };
}

function build_report(data, main) {
  const model = data.config, scores = data.scores, head = data.headline;
  const mounts = [];
  const add = part => { if (part.mount) mounts.push(part); return part.root || part; };
  const hasLengths = model.lengths.length > 0, last = model.lengths[model.lengths.length - 1];
  const total = Object.values(model.totals.kinds).reduce((a, b) => a + b, 0);

  main.append(h("dl", { class: "line" }, data.title_facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
  main.append(...data.notes.map(note => h("p", { class: "note" }, note)));
  main.append(h("section", { id: "summary" },
    h("div", { class: "cards" },
      card("heads", String(total), `${model.num_layers} layers × ${model.num_heads}`),
      card("density", hasLengths ? fixed(head.density) : "–", hasLengths ? `mean at ${tokens(last)}` : "nothing measured"),
      card("worst captured mass", hasLengths ? fixed(head.worst_mass, 4) : "–", known(model.target) ? `target ${model.target}` : "no target"),
      model.measured
        ? card("attention", known(head.speed_up) ? head.speed_up.toFixed(2) + "×" : ms(head.predicted_ms), `predicted, ${ms(head.predicted_ms)} at ${tokens(last)} on ${model.device}`)
        : card("time", "not measured", "measured: false, chosen by counted work", true),
      card("break-even", known(model.min_length) ? tokens(model.min_length) : "not measured", known(model.min_length) ? "below, dense is faster" : "needs a timing table", !known(model.min_length)))));

  const margin = runnerUpMargin(model, scores);
  const { metrics, setLength } = mapMetrics(model, margin);
  let view = null;
  const hover = (l, i) => {
    const c = model.choice.at(l, i);
    if (Number.isNaN(c)) return `layer ${l}: ${model.layer_types[l]} attention`;
    const lines = [`layer ${l}, head ${i}`, plain(model.patterns[c].plain)];
    model.lengths.forEach((n, k) => lines.push(`${tokens(n)}: mass ${fixed(model.at.mass_mean.at(k, l, i), 4)}, worst ${fixed(model.at.mass_worst_region.at(k, l, i), 4)}, density ${fixed(model.at.density.at(k, l, i))}` + (model.measured ? `, ${ms(model.at.predicted_ms.at(k, l, i))}` : "")));
    return lines.join("<br>");
  };
  const map = headMap({ numLayers: model.num_layers, numHeads: model.num_heads, metrics, first: "kind", title: "Layers × heads", name: "heads-map", hover, onPick: (l, i) => view.open(l, i), selected: () => view && view.place });
  if (model.lengths.length > 1) map.controls.append(segments("Length", model.lengths.map((n, k) => ({ value: k, label: tokens(n) })), model.lengths.length - 1, value => { setLength(value); map.redraw(); }));
  mounts.push(map);
  view = new HeadView(data, () => map.redraw());
  const others = [...new Set(model.layer_types)].filter(t => t !== "full");
  main.append(h("section", { id: "map" }, h("h2", {}, "Heads"),
    h("p", { class: "intro" }, "Every query head by layer. " + (others.length ? `Empty rows are ${others.join(" and ")} layers, which are left alone. ` : "") + "Open a head to see why it runs what it runs."),
    h("div", { class: "share", role: "img", "aria-label": model.kinds.map(k => `${k.label} ${model.totals.kinds[k.kind] || 0}`).join(", ") },
      model.kinds.filter(k => model.totals.kinds[k.kind]).map(k => h("span", { style: `flex:${model.totals.kinds[k.kind]};background:var(--${k.kind})`, title: `${k.label}: ${model.totals.kinds[k.kind]} heads` }))), map.root));

  if (hasLengths) {
    const parts = [], ranks = rankFigure(model);
    if (scores) parts.push(...wholeFrontier(model, scores));
    parts.push(splitFigure(model), breakEvenFigure(model), ...(ranks ? [ranks] : []), layerFigure(model));
    main.append(h("section", { id: "whole" }, h("h2", {}, "Whole model"), h("div", { class: "grid" }, parts.map(add))));
  }

  const gapKnown = model.oracle_gap.data.some(known);
  const columns = [
    { key: "layer", label: "layer", number: true }, { key: "head", label: "head", number: true },
    { key: "kind", label: "kind", node: row => kindChip(model.kinds, row.kind) }, { key: "pattern", label: "budget", format: (text, row) => text === row.kind ? "–" : text.replace(row.kind + " ", ""), title: "columns + slashes (d: tile diagonals), sink + window, or key tiles; T128: query tiles of 128" },
    ...(hasLengths ? [
      { key: "worst", label: "worst mass", number: true, digits: 4, title: "worst sample, region and length" }, { key: "mean", label: "mean mass", number: true, digits: 4 },
      { key: "heldout", label: "held-out", title: "worst held-out sample and region", number: true, digits: 4 }, { key: "density", label: "density", number: true, digits: 3 },
      ...(model.measured ? [{ key: "ms", label: "ms", number: true, digits: 4 }] : []), ...(gapKnown ? [{ key: "gap", label: "oracle gap", number: true, digits: 4 }] : []),
      { key: "runner_up", label: "runner-up" }, { key: "margin", label: "its cost", number: true, format: v => known(v) ? (v < 0 ? "−" : "+") + percent(Math.abs(v)) : "–", title: `${margin.noun} of the runner-up, against the chosen pattern` }] : []),
    ...(model.file_score ? [{ key: "score", label: "file score", number: true, digits: 4 }] : []),
  ];
  main.append(h("section", { id: "heads" }, h("h2", {}, "All heads"), hasLengths ? h("p", { class: "intro" }, `Numbers at ${tokens(last)}; worst mass over all lengths. ${model.measured ? "" : "No times: measured is false."}`) : null,
    sortableTable({ name: "heads", columns, rows: headRows(model, margin.of), search: true, onRow: row => view.open(row.layer, row.head),
      filters: [{ key: "kind", label: "Kind", options: model.kinds.map(k => ({ value: k.kind, label: k.label })) }, { key: "layer", label: "Layer", options: range(model.num_layers).filter(l => model.layer_types[l] === "full").map(l => ({ value: String(l), label: String(l) })) }] })));

  if (scores) {
    const unit = scores.unit === "ms" ? "index, ms" : "index, products";
    if (scores.estimators.length) main.append(h("section", { id: "estimators" }, h("h2", {}, "Estimators"),
      h("p", { class: "intro" }, `Mean mass over heads, samples and shared budgets; cost at target ${scores.estimator_target} if a head could only choose this way or dense. ${scores.measured ? "" : "Costs are counted, not measured."}`),
      sortableTable({ name: "estimators", rows: scores.estimators, columns: [
        { key: "kind", label: "kind", node: row => kindChip(model.kinds, row.kind) }, { key: "estimator", label: "estimator" }, { key: "tile", label: "tile", number: true }, { key: "length", label: "tokens", number: true }, { key: "num_budgets", label: "budgets", number: true },
        { key: "mass_online", label: "online mass", number: true, digits: 4 }, { key: "mass_oracle", label: "oracle mass", number: true, digits: 4 }, { key: "gap", label: "gap", number: true, digits: 4 },
        { key: "index_cost", label: unit, number: true, format: v => scores.unit === "ms" ? fixed(v, 4) : known(v) ? v.toExponential(1) : "–" }, { key: "cost_at_target", label: "cost at target, of dense", number: true, format: v => percent(v) }] })));
    main.append(h("section", { id: "samples" }, h("h2", {}, "Samples"), sortableTable({ name: "samples", rows: scores.samples, columns: [
      { key: "id", label: "sample", text: true }, { key: "source", label: "source" }, { key: "split", label: "split" }, { key: "length", label: "length", number: true }, { key: "num_tokens", label: "tokens", number: true }] })));
  }
  main.append(h("section", { id: "facts" }, h("h2", {}, "What this config is bound to"),
    data.facts.map(([group, pairs], i) => h("details", { open: i < 2 }, h("summary", {}, group), h("dl", {}, pairs.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))))));
  mountAll(mounts);
  const follow = () => {
    const wanted = /^#head-(\d+)-(\d+)$/.exec(location.hash);
    if (wanted && Number(wanted[2]) < model.num_heads && known(model.choice.at(Number(wanted[1]), Number(wanted[2])))) view.open(Number(wanted[1]), Number(wanted[2]));
  };
  addEventListener("hashchange", follow);
  follow();
}
