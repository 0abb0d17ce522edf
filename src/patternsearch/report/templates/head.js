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
    ? { label: `predicted ms of this head (${scores.device})`, of: p => p.cost }
    : { label: "pairs executed, as a share of dense (counted, not measured)", of: p => p.cost / dense.cost };
}

const marker = (points, color, symbol, size, name, x, y) => ({
  x: points.map(x), y: points.map(y), mode: "markers", name,
  marker: { color, symbol, size, line: { color: style("--bg"), width: 1.5 } },
  hovertext: points.map(p => plain(p.candidate.plain)), hoverinfo: "text+x+y",
});

const targetLine = target => known(target) ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: target, y1: target, line: { color: style("--muted"), dash: "dot", width: 1 } }] : [];

function massFloor(values) {
  const low = Math.min(...values.filter(known));
  return Math.max(0, Math.min(low, 0.98) - 0.03);
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
        xaxis: { title: { text: "density (causal pairs read / all)" }, type: "log", dtick: "D2" },
        yaxis: { title: { text: mass === "worst" ? "worst sample and region" : "mean over samples" }, range: [massFloor(points.map(p => p[mass])), 1.008] },
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
        xaxis: { title: { text: axis.label }, type: "log", dtick: "D2" },
        yaxis: { title: { text: "mass reached" }, range: [massFloor(points.map(p => p.reached)), 1.008] }, shapes: targetLine(model.target),
      } };
    },
  });
}

function regionFigure(model, scores, layerPlace, head, kind) {
  const all = scores.samples.map((sample, s) => ({ ...sample, mass: REGIONS.map((_, r) => scores.sample_mass.at(s, layerPlace, head, r)) }));
  const lengths = [...new Set(all.map(s => s.length))];
  return figure({
    title: "Every sample and region of the chosen pattern", name: "head-samples", height: 300,
    caption: "Bars: mean over calibration samples in each quarter of the rows. Points: single samples; hollow ones were held out.",
    csv: () => ({ header: ["sample", "source", "split", "length", "num_tokens", "all", "q1", "q2", "q3", "q4"], rows: all.map(s => [s.id, s.source, s.split, s.length, s.num_tokens, ...s.mass]) }),
    draw: () => {
      const shades = [0.28, 0.5, 0.75, 0.9];
      const bars = lengths.map((length, k) => {
        const mine = all.filter(s => s.length === length && s.split === "calibration");
        const mean = REGIONS.map((_, r) => { const v = mine.map(s => s.mass[r]).filter(known); return v.length ? v.reduce((a, b) => a + b, 0) / v.length : null; });
        return { type: "bar", x: REGIONS, y: mean, name: tokens(length), marker: { color: kindColor(kind), opacity: shades[k % 4] }, offsetgroup: String(length), hovertemplate: "%{x}: mean %{y:.4f}<extra>" + tokens(length) + "</extra>" };
      });
      const dots = [];
      for (const length of lengths) for (const split of ["calibration", "heldout"]) {
        const mine = all.filter(s => s.length === length && s.split === split);
        if (mine.length) dots.push({
          type: "box", boxpoints: "all", pointpos: 0, jitter: 0.7, fillcolor: "rgba(0,0,0,0)", line: { color: "rgba(0,0,0,0)" }, width: 0.5 / lengths.length,
          x: mine.flatMap(() => REGIONS), y: mine.flatMap(s => s.mass.map(v => known(v) ? v : null)), offsetgroup: String(length), showlegend: false, hoveron: "points",
          marker: { symbol: split === "heldout" ? "circle-open" : "circle", size: 5, color: style("--text"), opacity: 0.8 },
          text: mine.flatMap(s => REGIONS.map(() => plain(`${s.id}, ${s.source}, ${s.split}`))), hovertemplate: "%{text}<br>%{y:.4f}<extra></extra>",
        });
      }
      return { data: [...bars, ...dots], layout: { barmode: "group", boxmode: "group", yaxis: { title: { text: "captured mass" }, range: [massFloor(all.flatMap(s => s.mass)), 1.005] }, shapes: targetLine(model.target) } };
    },
  });
}

function gapFigure(model, layer, head, thumbnail) {
  const rows = model.lengths.map((length, k) => ({ length, online: model.at.mass_mean.at(k, layer, head), oracle: model.at.oracle_mean.at(k, layer, head), gap: model.oracle_gap.at(k, layer, head) }));
  const topk = thumbnail ? { length: thumbnail.num_tokens, online: thumbnail.mass, topk: thumbnail.top_k } : null;
  if (!rows.some(r => known(r.oracle)) && !topk)
    return message("Index gap", "No oracle index was scored for this head (static and dense patterns need none): calibrate with --oracle to see what the estimator loses.");
  return figure({
    title: "Who loses the mass: the estimator or the pattern", name: "head-gap", height: 260,
    caption: "Online to oracle is the estimator's loss; oracle to dense top-k, the most that as many pairs can hold, is the family's loss. Top-k is computed with --thumbnails, on one sample.",
    csv: () => ({ header: ["length", "online_mean", "oracle_mean", "gap"], rows: rows.map(r => [r.length, r.online, r.oracle, r.gap]) }),
    draw: () => {
      const names = rows.map(r => tokens(r.length)), data = [
        { type: "bar", name: "online", x: names, y: rows.map(r => known(r.online) ? r.online : null), marker: { color: style("--accent") }, hovertemplate: "online %{y:.4f}<extra></extra>" },
        { type: "bar", name: "oracle", x: names, y: rows.map(r => known(r.gap) ? r.oracle : null), marker: { color: style("--good") }, hovertemplate: "oracle %{y:.4f}<extra></extra>" }];
      if (topk) {
        const name = `one sample, ${topk.length} tokens`;
        data[0].x.push(name); data[0].y.push(topk.online);
        data.push({ type: "bar", name: "dense top-k", x: [name], y: [topk.topk], marker: { color: style("--muted") }, hovertemplate: "dense top-k %{y:.4f}<extra></extra>" });
      }
      const values = data.flatMap(d => d.y);
      return { data, layout: { barmode: "group", yaxis: { title: { text: "captured mass" }, range: [massFloor(values.filter(v => v !== null)), 1.005] } } };
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
        { x, y, mode: "lines", line: { color: "#ffffff", width: 1.6 }, hoverinfo: "skip", showlegend: false },
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
