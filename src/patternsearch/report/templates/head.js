// The view of one head: its numbers, every candidate, samples and regions, gaps, a drawing.

const REGIONS = ["all rows", "q1", "q2", "q3", "q4"];

/** Candidates of one head as points, with the curve that each belongs to. */
function headPoints(scores, layerPlace, head, lengthPlace) {
  return scores.candidates.map((candidate, c) => ({
    c, candidate,
    density: scores.density.at(lengthPlace, layerPlace, head, c),
    mean: scores.mean.at(lengthPlace, layerPlace, head, c),
    worst: scores.worst.at(lengthPlace, layerPlace, head, c),
    oracle: scores.oracle ? scores.oracle.at(lengthPlace, layerPlace, head, c) : NaN,
    cost: scores.cost.at(lengthPlace, layerPlace, head, c) * scores.cost_scale,
    reached: scores.reached.at(layerPlace, head, c),
  }));
}

function curves(points) {
  const lines = new Map();
  for (const point of points) {
    if (!lines.has(point.candidate.line)) lines.set(point.candidate.line, []);
    lines.get(point.candidate.line).push(point);
  }
  return [...lines.values()].map(line => line.sort((a, b) => a.candidate.budget - b.candidate.budget));
}

/** Points that no other beats in both cost and mass, by cost. */
function efficient(points, mass) {
  const sorted = points.filter(p => known(p.cost) && known(p[mass])).sort((a, b) => a.cost - b.cost || b[mass] - a[mass]);
  const front = [];
  for (const point of sorted) if (!front.length || point[mass] > front[front.length - 1][mass] + 1e-9) front.push(point);
  return front;
}

function costAxis(scores, points) {
  const dense = points.find(p => p.candidate.kind === "dense");
  return scores.unit === "ms"
    ? { label: "predicted ms of this head", of: p => p.cost }
    : { label: "pairs executed / dense (counted)", of: p => p.cost / dense.cost };
}

const marker = (points, color, symbol, size, name, x, y) => ({
  x: points.map(x), y: points.map(y), mode: "markers", name,
  marker: { color, symbol, size, line: { color: style("--bg"), width: 1.5 } },
  hovertext: points.map(p => plain(p.candidate.plain)), hoverinfo: "text+x+y",
});

const targetLine = target => known(target) ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: target, y1: target, line: { color: style("--muted"), dash: "dot", width: 1 } }] : [];

/** Axis range of masses: from just below the least to a little above 1, so that markers are whole. */
function massRange(values) {
  const low = Math.min(0.98, ...values.filter(known));
  const span = 1 - low;
  return [low - 0.08 * span, 1 + 0.06 * span];
}

function budgetFigure(model, scores, layerPlace, head, lengthPlace, chosen) {
  let mass = "worst";
  const length = scores.lengths[lengthPlace];
  const points = headPoints(scores, layerPlace, head, lengthPlace);
  const plotted = figure({
    title: `Captured mass against budget at ${tokens(length)}`, name: "head-budget", height: 330,
    caption: "Each line raises one budget: window, tile diagonals, slashes or blocks. Dashed lines use tile 128. Dotted: the target.",
    csv: () => ({ header: ["candidate", "kind", "density", "mass_mean", "mass_worst_region", "mass_reached", "cost", "unit"],
      rows: points.map(p => [p.candidate.name, p.candidate.kind, p.density, p.mean, p.worst, p.reached, p.cost, scores.unit]) }),
    draw: () => {
      const seen = new Set();
      const data = curves(points).map(line => {
        const kind = line[0].candidate.kind, color = kindColor(kind), fresh = !seen.has(kind);
        seen.add(kind);
        return {
          x: line.map(p => p.density), y: line.map(p => p[mass]), mode: kind === "dense" ? "markers" : "lines+markers",
          name: model.kinds.find(k => k.kind === kind).label, legendgroup: kind, showlegend: fresh,
          line: { color, width: 1.4, dash: line[0].candidate.line.includes("tile=128") ? "dash" : "solid" }, marker: { color, size: 5 },
          hovertext: line.map(p => `${plain(p.candidate.plain)}<br>mass ${fixed(p[mass], 4)}, density ${fixed(p.density)}`), hoverinfo: "text",
        };
      });
      if (chosen >= 0) data.push(marker([points[chosen]], style("--text"), "star", 14, "chosen", p => p.density, p => p[mass]));
      return { data, layout: {
        xaxis: { ...LOG_AXIS, title: { text: "density (causal pairs read / all)" } },
        yaxis: { title: { text: mass === "worst" ? "worst sample and region" : "mean over samples" }, range: massRange(points.map(p => p[mass])) },
        shapes: targetLine(model.target),
      } };
    },
  });
  plotted.root.insertBefore(segments("Which mass", [{ value: "worst", label: "worst" }, { value: "mean", label: "mean" }], mass,
    value => { mass = value; plotted.redraw(); }), plotted.plot);
  return plotted;
}

function frontierFigure(model, scores, layerPlace, head, lengthPlace, chosen, second) {
  const points = headPoints(scores, layerPlace, head, lengthPlace), axis = costAxis(scores, points);
  const front = efficient(points, "reached");
  return figure({
    title: (scores.unit === "ms" ? "Time" : "Work") + ` against the mass that is reached everywhere, ${tokens(scores.lengths[lengthPlace])}`,
    name: "head-cost", height: 330,
    caption: "The mass is what selection compares with the target: least over samples, regions and lengths. The step line is the efficient frontier.",
    csv: () => ({ header: ["candidate", "kind", "cost", "unit", "mass_reached", "efficient"],
      rows: points.map(p => [p.candidate.name, p.candidate.kind, p.cost, scores.unit, p.reached, front.includes(p)]) }),
    draw: () => {
      const data = model.kinds.map(kind => {
        const mine = points.filter(p => p.candidate.kind === kind.kind && known(p.cost));
        return { ...marker(mine, kindColor(kind.kind), "circle", 7, kind.label, axis.of, p => p.reached),
          hovertext: mine.map(p => `${plain(p.candidate.plain)}<br>mass ${fixed(p.reached, 4)}, ${scores.unit === "ms" ? ms(p.cost) : percent(axis.of(p)) + " of dense"}`), hoverinfo: "text" };
      });
      data.push({ x: front.map(axis.of), y: front.map(p => p.reached), mode: "lines", name: "frontier", hoverinfo: "skip", line: { color: style("--text"), width: 1, shape: "hv" } });
      if (second >= 0 && points[second]) data.push(marker([points[second]], style("--muted"), "diamond", 11, "runner-up", axis.of, p => p.reached));
      if (chosen >= 0) data.push(marker([points[chosen]], style("--text"), "star", 14, "chosen", axis.of, p => p.reached));
      return { data, layout: {
        xaxis: { ...LOG_AXIS, title: { text: axis.label } },
        yaxis: { title: { text: "mass reached" }, range: massRange(points.map(p => p.reached)) }, shapes: targetLine(model.target),
      } };
    },
  });
}

function regionFigure(model, scores, layerPlace, head, kind) {
  const all = scores.samples.map((sample, s) => ({ ...sample, mass: REGIONS.map((_, r) => scores.sample_mass.at(s, layerPlace, head, r)) }));
  const lengths = [...new Set(all.map(s => s.length))];
  return figure({
    title: "Every sample and region of the chosen pattern", name: "head-samples", height: 300,
    caption: "Bars: mean over calibration samples, for all rows and for each quarter of them. Points: single samples; hollow ones were held out.",
    csv: () => ({ header: ["sample", "source", "split", "length", "num_tokens", "all", "q1", "q2", "q3", "q4"], rows: all.map(s => [s.id, s.source, s.split, s.length, s.num_tokens, ...s.mass]) }),
    draw: () => {
      const shades = [0.45, 0.7, 0.9, 1], data = [];
      lengths.forEach((length, k) => {
        const mine = all.filter(s => s.length === length), color = kindColor(kind);
        const group = { type: "scatter", mode: "markers", offsetgroup: String(length) };
        const mean = REGIONS.map((_, r) => {
          const v = mine.filter(s => s.split === "calibration").map(s => s.mass[r]).filter(known);
          return v.length ? v.reduce((a, b) => a + b, 0) / v.length : null;
        });
        data.push({ ...group, x: REGIONS, y: mean, name: tokens(length), hovertemplate: `%{x}: mean %{y:.4f}<extra>${tokens(length)}</extra>`,
          marker: { symbol: "line-ew", size: 30, line: { color, width: 5 }, color, opacity: shades[k % 4] } });
        for (const split of ["calibration", "heldout"]) {
          const part = mine.filter(s => s.split === split);
          data.push({ ...group, showlegend: false, x: part.flatMap(() => REGIONS), y: part.flatMap(s => s.mass.map(v => known(v) ? v : null)),
            marker: { symbol: split === "heldout" ? "circle-open" : "circle", size: 6, color: style("--text"), opacity: 0.7 },
            text: part.flatMap(s => REGIONS.map(() => plain(`${s.id}, ${s.source}, ${s.split}`))), hovertemplate: "%{text}<br>%{y:.4f}<extra></extra>" });
        }
      });
      return { data, layout: { scattermode: "group", scattergap: 0.3, xaxis: { type: "category" }, yaxis: { title: { text: "captured mass" }, range: massRange([model.target, ...all.flatMap(s => s.mass)]) }, shapes: targetLine(model.target) } };
    },
  });
}

function gapFigure(model, layer, head, thumbnail) {
  if (model.patterns[model.choice.at(layer, head)].kind === "dense") return message("Index gap", "A dense head reads everything: there is no index that could lose mass.");
  const rows = model.lengths.map((length, k) => ({ length, online: model.at.mass_mean.at(k, layer, head), oracle: model.at.oracle_mean.at(k, layer, head), gap: model.oracle_gap.at(k, layer, head) }));
  const topk = thumbnail ? { length: thumbnail.num_tokens, online: thumbnail.mass, topk: thumbnail.top_k } : null;
  if (!rows.some(r => known(r.oracle)) && !topk)
    return message("Index gap", "No oracle index was scored for this head (a static pattern needs none): calibrate with --oracle to see what the estimator loses.");
  return figure({
    title: "Who loses the mass: the estimator or the pattern", name: "head-gap", height: 260,
    caption: "Online to oracle is the estimator's loss; oracle to dense top-k, the most that as many pairs can hold, is the family's loss. Top-k is computed with --thumbnails, on one sample.",
    csv: () => ({ header: ["length", "online_mean", "oracle_mean", "gap"], rows: rows.map(r => [r.length, r.online, r.oracle, r.gap]) }),
    draw: () => {
      const columns = rows.map(r => ({ name: tokens(r.length), online: r.online, oracle: known(r.gap) ? r.oracle : NaN, topk: NaN }));
      if (topk) columns.push({ name: `one sample, ${topk.length} tokens`, online: topk.online, oracle: NaN, topk: topk.topk });
      const series = [["online", "online", "circle", "--accent"], ["oracle", "oracle", "diamond", "--good"], ["topk", "dense top-k", "square", "--muted"]];
      const lines = columns.flatMap(c => { const v = [c.online, c.oracle, c.topk].filter(known); return [[c.name, Math.min(...v)], [c.name, Math.max(...v)], [null, null]]; });
      const data = [{ x: lines.map(l => l[0]), y: lines.map(l => l[1]), mode: "lines", line: { color: style("--bad"), width: 2, dash: "dot" }, hoverinfo: "skip", name: "loss" }];
      for (const [key, name, symbol, color] of series) {
        const mine = columns.filter(c => known(c[key]));
        if (mine.length) data.push({ x: mine.map(c => c.name), y: mine.map(c => c[key]), name, mode: "markers", marker: { symbol, size: 12, color: style(color) }, hovertemplate: name + " %{y:.4f}<extra></extra>" });
      }
      return { data, layout: { xaxis: { type: "category", range: [-0.5, columns.length - 0.5] }, yaxis: { title: { text: "captured mass" }, range: massRange(columns.flatMap(c => [c.online, c.oracle, c.topk])) } } };
    },
  });
}

function thumbnailFigure(thumbnail, kind) {
  const size = thumbnail.tiles, unit = thumbnail.tile;
  return figure({
    title: "Where this head looks, and what the pattern reads", name: "head-map", height: 420,
    caption: `Mass of each tile of ${unit} × ${unit} positions (colour: log scale), ${thumbnail.num_tokens} tokens of sample ${thumbnail.sample}. Outlined: tiles that are read; triangles below: gathered columns.`,
    csv: () => ({ header: ["query_tile", "key_tile", "mass", "read"], rows: range(size).flatMap(u => range(u + 1).map(v => [u, v, thumbnail.mass_map.at(u, v), thumbnail.read.at(u, v)])) }),
    draw: () => {
      const z = range(size).map(u => range(size).map(v => v <= u ? Math.log10(Math.max(thumbnail.mass_map.at(u, v), 1e-6)) : null));
      const shapes = [], edges = [];
      const reads = (u, v) => u >= 0 && u < size && v >= 0 && v < size && thumbnail.read.at(u, v) > 0;
      for (let u = 0; u < size; u++) for (let v = 0; v <= u; v++) if (reads(u, v)) {
        if (!reads(u - 1, v)) edges.push([v - .5, u - .5, v + .5, u - .5]);
        if (!reads(u + 1, v)) edges.push([v - .5, u + .5, v + .5, u + .5]);
        if (!reads(u, v - 1)) edges.push([v - .5, u - .5, v - .5, u + .5]);
        if (!reads(u, v + 1)) edges.push([v + .5, u - .5, v + .5, u + .5]);
      }
      const x = [], y = [];
      for (const [x0, y0, x1, y1] of edges) { x.push(x0, x1, null); y.push(y0, y1, null); }
      const data = [
        { type: "heatmap", z, colorscale: SEQUENTIAL, zmin: -4, zmax: 0, hoverongaps: false, hovertemplate: "query tile %{y}, key tile %{x}<br>mass 10^%{z:.2f} a row<extra></extra>",
          colorbar: { thickness: 10, outlinewidth: 0, tickvals: [-4, -3, -2, -1, 0], ticktext: ["≤1e-4", "1e-3", "0.01", "0.1", "1"] } },
        ...[["#000000", 3], ["#ffffff", 1.2]].map(([color, width]) => ({ x, y, mode: "lines", line: { color, width }, hoverinfo: "skip", showlegend: false })),
        { x: thumbnail.columns.map(j => j / unit - .5), y: thumbnail.columns.map(() => size + .2), mode: "markers", marker: { symbol: "triangle-up", size: 6, color: kindColor(kind) }, hovertext: thumbnail.columns.map(j => `column ${j}`), hoverinfo: "text", showlegend: false },
      ];
      return { data, layout: { shapes, plot_bgcolor: style("--empty"), xaxis: { title: { text: "key tile" }, showgrid: false, range: [-.5, size - .5], zeroline: false }, yaxis: { title: { text: "query tile" }, showgrid: false, zeroline: false, range: [size + .8, -.5] } } };
    },
  });
}

class HeadView {
  constructor(data, onChange) {
    this.data = data; this.model = data.config; this.onChange = onChange;
    this.place = null; this.shown = [];
    this.drawer = document.getElementById("drawer");
    document.addEventListener("keydown", event => {
      if (this.drawer.hidden || event.target.matches("input, select")) return;
      if (event.key === "Escape") this.close();
      if (event.key === "ArrowRight") this.step(1);
      if (event.key === "ArrowLeft") this.step(-1);
    });
  }
  close() {
    this.shown.forEach(part => part.drop && part.drop()); this.shown = [];
    this.drawer.hidden = true; this.place = null; this.onChange();
    history.replaceState(null, "", location.pathname + location.search);
    if (this.back && this.back.isConnected) this.back.focus();
  }
  step(by) {
    const { num_heads: heads, num_layers: layers } = this.model;
    let flat = this.place[0] * heads + this.place[1];
    do flat = (flat + by + heads * layers) % (heads * layers);
    while (Number.isNaN(this.model.choice.at(Math.floor(flat / heads), flat % heads)));
    this.open(Math.floor(flat / heads), flat % heads);
  }
  open(layer, head) {
    const { data, model } = this, scores = data.scores;
    if (this.drawer.hidden) this.back = document.activeElement;
    this.shown.forEach(part => part.drop && part.drop());
    this.place = [layer, head];
    history.replaceState(null, "", `#head-${layer}-${head}`);
    const pattern = model.patterns[model.choice.at(layer, head)];
    const layerPlace = scores ? scores.layers.indexOf(layer) : -1;
    const parts = [];
    const secondPlace = model.runner_up.pattern.at(layer, head);
    const second = Number.isNaN(secondPlace) ? null : model.patterns[secondPlace];
    if (layerPlace >= 0) {
      const chosen = scores.chosen.at(layerPlace, head), c = Number.isNaN(chosen) ? -1 : chosen;
      const s = second ? scores.candidates.findIndex(x => x.name === second.name) : -1;
      const last = scores.lengths.length - 1;
      let lengthPlace = this.lengthPlace === undefined ? last : Math.min(this.lengthPlace, last);
      parts.push(budgetFigure(model, scores, layerPlace, head, lengthPlace, c));
      parts.push(frontierFigure(model, scores, layerPlace, head, lengthPlace, c, s));
      parts.push(regionFigure(model, scores, layerPlace, head, pattern.kind));
    }
    const thumbnail = data.thumbnails ? data.thumbnails.heads.find(t => t.layer === layer && t.head === head) : null;
    parts.push(gapFigure(model, layer, head, thumbnail));
    parts.push(thumbnail ? thumbnailFigure(thumbnail, pattern.kind)
      : message("Drawing of the attention", "Not drawn: a drawing needs the model again. Make the page with --thumbnails MODEL --heads " + layer + ":" + head + "."));
    const bar = h("div", { class: "bar" },
      h("h2", {}, `Layer ${layer} · head ${head}`),
      scores && scores.lengths.length > 1 ? segments("Length of the curves", scores.lengths.map((n, k) => ({ value: k, label: n >= 1024 ? `${+(n / 1024).toFixed(1)}k` : String(n) })),
        this.lengthPlace === undefined ? scores.lengths.length - 1 : this.lengthPlace, value => { this.lengthPlace = value; this.open(layer, head); }) : null,
      h("button", { type: "button", "aria-label": "Previous head", onclick: () => this.step(-1) }, "←"),
      h("button", { type: "button", "aria-label": "Next head", onclick: () => this.step(1) }, "→"),
      h("button", { type: "button", id: "close", "aria-label": "Close", onclick: () => this.close() }, "Close"));
    this.drawer.replaceChildren(bar,
      h("p", { class: "lead" }, h("span", { class: "swatch", style: `background:var(--${pattern.kind})` }), pattern.plain),
      h("p", { class: "intro" }, `kv head ${Math.floor(head / model.group)}. `, this.secondText(layer, head, second)),
      this.numbers(layer, head), h("p", {}), ...parts.map(part => part.root || part));
    this.drawer.hidden = false;
    this.drawer.scrollTop = 0;
    this.shown = parts.filter(part => part.mount);
    this.shown.forEach(part => part.mount());
    document.getElementById("close").focus({ preventScroll: true });
    this.onChange();
  }
  secondText(layer, head, second) {
    if (!second) return "No other candidate was recorded as the runner-up.";
    const r = this.model.runner_up, time = r.predicted_ms.at(layer, head);
    return `Runner-up: ${second.plain}, worst mass ${fixed(r.mass_worst_region.at(layer, head), 4)}, density ${fixed(r.density.at(layer, head))}${known(time) ? ", " + ms(time) : ""}.`;
  }
  numbers(layer, head) {
    const { model } = this, at = model.at;
    if (!model.lengths.length) {
      const score = model.file_score ? model.file_score.values.at(layer, head) : NaN;
      return h("p", {}, `Score in the imported file: ${fixed(score, 4)} (${model.file_score ? model.file_score.kind.replace("_", " ") : "none"}).`);
    }
    const rows = [
      ["mean captured mass", "mass_mean", 4], ["worst sample", "mass_worst", 4], ["worst sample and region", "mass_worst_region", 4],
      ["spread over samples (std)", "mass_std", 4], ["held-out mean", "heldout_mean", 4], ["held-out worst region", "heldout_worst_region", 4],
      ["oracle mean", "oracle_mean", 4], ["density", "density", 4], ["tiles read", "tiles", 0], ["columns gathered", "columns", 0],
    ];
    const body = rows.map(([label, key, digits]) => h("tr", {}, h("td", {}, label), model.lengths.map((_, k) => h("td", { class: "n" }, fixed(at[key].at(k, layer, head), digits)))));
    body.push(h("tr", {}, h("td", {}, "predicted time"), model.lengths.map((_, k) => h("td", { class: "n" }, model.measured ? ms(at.predicted_ms.at(k, layer, head)) : "not measured"))));
    return h("div", { class: "tablewrap" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, ""), model.lengths.map(n => h("th", { class: "n" }, tokens(n))))), h("tbody", {}, body)));
  }
}
