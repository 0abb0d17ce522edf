// A map of layers × heads. `metrics` are {value, label, scale, cell(layer, head), hover, …}.

const SEQUENTIAL = [[0, "#440154"], [0.25, "#3b528b"], [0.5, "#21918c"], [0.75, "#5ec962"], [1, "#fde725"]];
const DIVERGING = [[0, "#b2182b"], [0.25, "#ef8a62"], [0.5, "#d9dde3"], [0.75, "#67a9cf"], [1, "#2166ac"]];

/** Colours of a metric whose values are places in a list of named classes. */
function classScale(colors) {
  const scale = [];
  colors.forEach((color, i) => scale.push([i / colors.length, color], [(i + 1) / colors.length, color]));
  return scale;
}

function headMap({ numLayers, numHeads, metrics, first, title, caption, name, hover, onPick, selected, rowLabel }) {
  let metric = metrics.find(m => m.value === first);
  const legend = h("div", { class: "legend" });
  const wrap = h("div", { class: "wide" });
  const rowHeight = Math.max(9, Math.min(20, 900 / numLayers));
  const height = Math.round(numLayers * rowHeight) + 74;
  const texts = range(numLayers).map(l => range(numHeads).map(i => hover(l, i)));
  const plotted = figure({
    title, caption, name, height, wide: true,
    csv: () => ({
      header: ["layer", "head", ...metrics.filter(m => !m.disabled).map(m => m.column || m.value)],
      rows: range(numLayers).flatMap(l => range(numHeads).map(i => [l, i, ...metrics.filter(m => !m.disabled).map(m => m.csv ? m.csv(l, i) : m.cell(l, i))])),
    }),
    draw: () => {
      const z = range(numLayers).map(l => range(numHeads).map(i => { const v = metric.cell(l, i); return known(v) ? v : null; }));
      const flat = z.flat().filter(v => v !== null);
      const low = Math.min(...flat), high = Math.max(...flat);
      const classes = metric.classes;
      let zmin = classes ? -0.5 : low, zmax = classes ? classes.length - 0.5 : high;
      if (metric.diverging) { const m = Math.max(Math.abs(low), Math.abs(high), 1e-9); zmin = -m; zmax = m; }
      if (metric.top !== undefined && !classes) zmax = metric.top;
      if (!flat.length) { zmin = 0; zmax = 1; }
      if (zmax <= zmin) zmin = zmax - 1e-9;
      const showLetters = classes && metric.letters && numHeads <= 40 && window.innerWidth > 860;
      const trace = {
        type: "heatmap", z, zmin, zmax, xgap: numHeads > 80 ? 0 : 1, ygap: numLayers > 100 ? 0 : 1,
        colorscale: classes ? classScale(classes.map(c => c.color())) : metric.diverging ? DIVERGING : SEQUENTIAL,
        reversescale: Boolean(metric.reverse), showscale: !classes,
        colorbar: { thickness: 10, len: 1, outlinewidth: 0, tickfont: { size: 11 }, tickformat: metric.tickformat },
        hovertext: texts, hoverinfo: "text", hoverongaps: false,
      };
      if (showLetters) {
        trace.text = z.map(row => row.map(v => v === null ? "" : metric.letters[v]));
        trace.texttemplate = "%{text}"; trace.textfont = { size: 10, color: "#ffffff" };
      }
      const mark = selected ? selected() : null;
      return {
        data: [trace],
        caption: metric.caption || caption,
        layout: {
          plot_bgcolor: style("--empty"),
          margin: { l: 44, r: 10, t: 4, b: 44 },
          xaxis: { title: { text: "query head" }, showgrid: false, zeroline: false, range: [-0.5, numHeads - 0.5], dtick: numHeads > 16 ? 4 : 1, tick0: 0 },
          yaxis: {
            title: { text: "layer" }, showgrid: false, zeroline: false, range: [numLayers - 0.5, -0.5],
            ...(rowLabel ? { tickvals: range(numLayers).filter(l => l % Math.ceil(numLayers / 16) === 0), ticktext: range(numLayers).filter(l => l % Math.ceil(numLayers / 16) === 0).map(rowLabel) } : { dtick: numLayers > 16 ? 4 : 1, tick0: 0 }),
          },
          shapes: mark ? [{ type: "rect", x0: mark[1] - 0.5, x1: mark[1] + 0.5, y0: mark[0] - 0.5, y1: mark[0] + 0.5, line: { color: style("--text"), width: 2.5 } }] : [],
        },
      };
    },
    onClick: point => { if (onPick && known(point.z)) onPick(point.y, point.x); },
  });
  function showLegend() {
    legend.replaceChildren(...(metric.classes || []).map(c => {
      const swatch = h("span", { class: "swatch", style: `background:${c.variable ? `var(${c.variable})` : c.color()}` });
      return h("span", {}, swatch, c.label);
    }));
  }
  const controls = h("div", { class: "controls" },
    segments("What the map shows", metrics.map(m => ({ value: m.value, label: m.label, disabled: m.disabled, title: m.title })), metric.value,
      value => { metric = metrics.find(m => m.value === value); showLegend(); plotted.redraw(); }));
  wrap.append(controls, legend, plotted.root);
  showLegend();
  return { root: wrap, controls, mount: plotted.mount, redraw: plotted.redraw };
}
