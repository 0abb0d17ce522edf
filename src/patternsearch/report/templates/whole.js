// Figures of the whole model: frontier, kinds, time split, ranks, break-even, layers.

function wholeFrontier(model, scores) {
  const points = scores.frontier, lengths = [...new Set(points.map(p => p.length))];
  const speed = figure({
    title: scores.measured ? "Target mass against predicted speed-up of attention" : "Target mass against work saved (counted, not measured)",
    name: "frontier", height: 320,
    caption: scores.measured ? `Dense time / chosen time of all heads, predicted for ${scores.device}.` : "Pairs of dense attention / pairs executed. Counted work is an order, not a time: no GPU was measured.",
    csv: () => ({ header: ["target_mass", "length", "cost", "unit", "ratio", "density", "mass_mean"], rows: points.map(p => [p.target_mass, p.length, p.cost, scores.unit, p.speed_up, p.density, p.mass_mean]) }),
    draw: () => ({
      data: lengths.map((length, k) => {
        const mine = points.filter(p => p.length === length);
        return { x: mine.map(p => p.target_mass), y: mine.map(p => p.speed_up), mode: "lines+markers", name: tokens(length), line: { color: [style("--accent"), style("--a_shape"), style("--block_sparse"), style("--dense")][k % 4] },
          hovertext: mine.map(p => `target ${p.target_mass}<br>${p.speed_up.toFixed(2)}×, density ${fixed(p.density)}<br>mean mass ${fixed(p.mass_mean, 4)}`), hoverinfo: "text" };
      }),
      layout: {
        xaxis: { title: { text: "target mass of every head" } }, yaxis: { title: { text: scores.measured ? "speed-up over dense (×)" : "dense pairs / pairs (×)" }, rangemode: "tozero" },
        shapes: known(model.target) ? [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: model.target, x1: model.target, line: { color: style("--muted"), dash: "dot", width: 1 } }] : [],
      },
    }),
  });
  const longest = points.filter(p => p.length === lengths[lengths.length - 1]);
  const kinds = figure({
    title: "Which kinds a target asks for", name: "kinds-by-target", height: 320, caption: "Heads by kind as the target rises.",
    csv: () => ({ header: ["target_mass", ...model.kinds.map(k => k.kind)], rows: longest.map(p => [p.target_mass, ...model.kinds.map(k => p.heads_by_kind[k.kind])]) }),
    draw: () => ({
      data: model.kinds.map(kind => ({ type: "bar", name: kind.label, x: longest.map(p => String(p.target_mass)), y: longest.map(p => p.heads_by_kind[kind.kind]), marker: { color: kindColor(kind.kind) }, hovertemplate: `target %{x}: %{y} heads<extra>${kind.label}</extra>` })),
      layout: { barmode: "stack", xaxis: { title: { text: "target mass" }, type: "category" }, yaxis: { title: { text: "heads" } } },
    }),
  });
  return [speed, kinds];
}

function splitFigure(model) {
  const measured = model.measured && model.by_length.every(at => model.kinds.every(k => known(at.by_kind[k.kind].ms)));
  const share = (at, kind) => measured ? at.by_kind[kind].ms : at.by_kind[kind].pairs / (at.length * (at.length + 1) / 2);
  return figure({
    title: measured ? "Predicted attention time by kind" : "Pairs read by kind (counted, not measured)", name: "split", height: 90 + 60 * model.by_length.length,
    caption: measured ? `Sum over heads, ms, ${model.device}.` : "In units of one dense head; no GPU was measured.",
    csv: () => ({ header: ["length", "kind", "heads", "density", measured ? "ms" : "dense_head_equivalents"], rows: model.by_length.flatMap(at => model.kinds.map(k => [at.length, k.kind, at.by_kind[k.kind].heads, at.by_kind[k.kind].density, share(at, k.kind)])) }),
    draw: () => ({
      data: model.kinds.map(kind => ({
        type: "bar", orientation: "h", name: kind.label, y: model.by_length.map(at => tokens(at.length)), x: model.by_length.map(at => share(at, kind.kind)), marker: { color: kindColor(kind.kind) },
        hovertext: model.by_length.map(at => `${kind.label}: ${at.by_kind[kind.kind].heads} heads, density ${fixed(at.by_kind[kind.kind].density)}<br>${measured ? ms(share(at, kind.kind)) : fixed(share(at, kind.kind), 1) + " dense heads"}`), hoverinfo: "text",
      })),
      layout: { barmode: "stack", xaxis: { title: { text: measured ? "ms" : "dense heads of work" } }, legend: { orientation: "h", y: -0.5 }, yaxis: { automargin: true } },
    }),
  });
}

/** Cost of every rank of a layout at the longest length. */
function rankCosts(model, size) {
  const last = model.lengths.length - 1, width = model.num_heads / size;
  return range(size).map(rank => {
    let total = 0;
    for (let l = 0; l < model.num_layers; l++) for (let i = rank * width; i < (rank + 1) * width; i++) {
      const value = (model.measured ? model.at.predicted_ms : model.at.density).at(last, l, i);
      if (known(value)) total += value;
    }
    return total;
  });
}

function rankFigure(model) {
  const kvHeads = model.num_heads / model.group, most = Math.max(32, model.tp_size);
  const sizes = range(most + 1).filter(size => size && model.num_heads % size === 0 && (kvHeads % size === 0 || size % kvHeads === 0));
  if (sizes.length < 2) return null;
  let size = model.tp_size > 1 ? model.tp_size : sizes.find(s => s >= 2) || 1;
  const plotted = figure({
    title: "Tensor-parallel ranks", name: "ranks", height: 300,
    csv: () => ({ header: ["tp_size", "rank", model.measured ? "predicted_ms" : "dense_head_equivalents"], rows: sizes.flatMap(s => rankCosts(model, s).map((cost, rank) => [s, rank, cost])) }),
    draw: () => {
      const costs = rankCosts(model, size), mean = costs.reduce((a, b) => a + b, 0) / costs.length, slowest = Math.max(...costs);
      return {
        caption: `The slowest rank sets the pace: ${percent(mean > 0 ? slowest / mean - 1 : 0)} above the mean with ${size} rank${size > 1 ? "s" : ""}. The config was made for ${model.tp_size}. ${model.measured ? "" : "Counted pairs, not measured."}`,
        data: [{ type: "bar", x: costs.map((_, rank) => `rank ${rank}`), y: costs, marker: { color: style("--accent"), opacity: costs.map(c => c === slowest ? 1 : 0.55) }, hovertemplate: "%{x}: %{y:.4g}<extra></extra>" }],
        layout: { yaxis: { title: { text: model.measured ? "predicted ms" : "dense heads of work" }, rangemode: "tozero" }, shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: mean, y1: mean, line: { color: style("--muted"), dash: "dot", width: 1 } }] },
      };
    },
  });
  plotted.root.insertBefore(segments("Number of ranks", sizes.map(s => ({ value: s, label: `TP ${s}` })), size, value => { size = value; plotted.redraw(); }), plotted.plot);
  return plotted;
}

function breakEvenFigure(model) {
  if (!model.break_even.length)
    return message("Break-even length", "Not measured: below which length dense is faster needs a timing table. Run ", h("code", {}, "patternsearch bench"), " on the GPU that will serve, then ", h("code", {}, "patternsearch select"), " with its table.");
  const points = model.break_even;
  if (points.length < 2) return message("Break-even length", `At ${tokens(points[0].length)} dense attention takes ${ms(points[0].dense_ms)}, the chosen patterns ${ms(points[0].sparse_ms)} (predicted for ${model.device}). Where they break even needs a second calibrated length.`);
  return figure({
    title: "Break-even: dense against chosen, attention of all heads", name: "break-even", height: 300,
    caption: `Predicted for ${model.device}; launches are the host's, hidden in a large model. Dense runs below ${model.min_length} tokens (vertical line).`,
    csv: () => ({ header: ["length", "dense_ms", "sparse_ms", "launch_ms"], rows: points.map(p => [p.length, p.dense_ms, p.sparse_ms, p.launch_ms]) }),
    draw: () => ({
      data: [["dense_ms", "dense", "--dense"], ["sparse_ms", "chosen", "--accent"], ["launch_ms", "launches of the chosen", "--warn"]].filter(([key]) => points.every(p => p[key] !== null)).map(([key, name, color]) => ({ x: points.map(p => p.length), y: points.map(p => p[key]), mode: "lines+markers", name, line: { color: style(color) }, hovertemplate: "%{x} tokens: %{y:.3f} ms<extra>" + name + "</extra>" })),
      layout: { xaxis: { title: { text: "tokens" }, type: "log", tickvals: points.map(p => p.length), ticktext: points.map(p => tokens(p.length).replace(" tokens", "")) }, yaxis: { title: { text: "ms" }, type: "log" },
        shapes: known(model.min_length) ? [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: model.min_length, x1: model.min_length, line: { color: style("--muted"), dash: "dot", width: 1 } }] : [] },
    }),
  });
}

function layerFigure(model) {
  const last = model.lengths.length - 1;
  const rows = range(model.num_layers).map(l => {
    const at = range(model.num_heads).map(i => ({ density: model.at.density.at(last, l, i), worst: Math.min(...model.lengths.map((_, k) => model.at.mass_worst_region.at(k, l, i))) })).filter(x => known(x.density));
    return { layer: l, density: at.length ? at.reduce((s, x) => s + x.density, 0) / at.length : null, worst: at.length ? Math.min(...at.map(x => x.worst)) : null };
  });
  return figure({
    title: `Layer by layer at ${tokens(model.lengths[last])}`, name: "layers", height: 300, caption: "Mean density of the layer's heads, and the worst mass of any of them at any length.",
    csv: () => ({ header: ["layer", "density_mean", "mass_worst"], rows: rows.map(r => [r.layer, r.density, r.worst]) }),
    draw: () => ({
      data: [
        { type: "bar", x: rows.map(r => r.layer), y: rows.map(r => r.density), name: "mean density", marker: { color: style("--accent"), opacity: 0.75 }, hovertemplate: "layer %{x}: density %{y:.3f}<extra></extra>" },
        { x: rows.map(r => r.layer), y: rows.map(r => r.worst), name: "worst mass", mode: "lines+markers", line: { color: style("--a_shape"), width: 1.5 }, marker: { size: 4 }, hovertemplate: "layer %{x}: worst mass %{y:.4f}<extra></extra>" }],
      layout: { xaxis: { title: { text: "layer" } }, yaxis: { range: [0, 1.02] }, shapes: targetLine(model.target) },
    }),
  });
}
