// --- data --------------------------------------------------------------------------------------

function bytesOf(base64) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

async function inflate(base64) {
  const stream = new Blob([bytesOf(base64)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** A packed array: `.shape`, `.at(i, j, …)`, NaN where a value is missing. */
class Values {
  constructor(shape, data, missing) {
    this.shape = shape; this.data = data; this.missing = missing;
  }
  at(...place) {
    let index = 0;
    for (let k = 0; k < this.shape.length; k++) index = index * this.shape[k] + place[k];
    const value = this.data[index];
    return value === this.missing ? NaN : value;
  }
}

const WIDTHS = { f32: 4, i16: 2, u16: 2, u8: 1 };
const ARRAYS = { f32: Float32Array, i16: Int16Array, u16: Uint16Array, u8: Uint8Array };

async function unpack(packed) {
  const planes = await inflate(packed.data), width = WIDTHS[packed.type];
  const count = planes.length / width, bytes = new Uint8Array(planes.length);
  for (let b = 0; b < width; b++)
    for (let i = 0, p = b * count; i < count; i++, p++) bytes[i * width + b] = planes[p];
  const raw = new ARRAYS[packed.type](bytes.buffer);
  if (packed.type !== "u16") return new Values(packed.shape, raw, packed.type === "i16" ? -1 : undefined);
  const scaled = new Float32Array(count);
  for (let i = 0; i < count; i++) scaled[i] = raw[i] === 65535 ? NaN : raw[i] * packed.scale;
  return new Values(packed.shape, scaled, undefined);
}

/** Replace every packed array inside a document. */
async function unpackAll(node) {
  if (node === null || typeof node !== "object") return node;
  if (typeof node.type === "string" && typeof node.data === "string" && Array.isArray(node.shape)) return unpack(node);
  const keys = Object.keys(node);
  const values = await Promise.all(keys.map(key => unpackAll(node[key])));
  keys.forEach((key, i) => { node[key] = values[i]; });
  return node;
}

// --- small things ------------------------------------------------------------------------------

/** Make an element; strings become text, never markup. */
function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return node;
}

/** Text for plotly, which reads a little markup in labels. */
const plain = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const known = value => value !== null && value !== undefined && !Number.isNaN(value);
const fixed = (value, digits = 3) => known(value) ? value.toFixed(digits) : "–";
const percent = (value, digits = 1) => known(value) ? (100 * value).toFixed(digits) + "%" : "–";
const tokens = value => value >= 1024 && value % 1024 === 0 ? `${value / 1024}k tokens` : `${value} tokens`;
const range = count => Array.from({ length: count }, (_, i) => i);
/** Ticks 1, 2, 5 of every decade, written out, for axes that grow by factors. */
const DECADES = range(10).flatMap(k => [1, 2, 5].map(m => Number(`${m}e${k - 5}`)));
const LOG_AXIS = { type: "log", tickmode: "array", tickvals: DECADES, ticktext: DECADES.map(String) };
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const kindColor = kind => style("--" + kind);
const ms = value => !known(value) ? "–" : value >= 100 ? value.toFixed(0) + " ms" : value >= 1 ? value.toFixed(2) + " ms" : value.toFixed(4) + " ms";

function download(name, header, rows) {
  const cell = value => {
    const text = value === null || value === undefined || Number.isNaN(value) ? "" : String(value);
    const guarded = /^[=+@\t\r]|^-(?![\d.])/.test(text) ? "'" + text : text;
    return /[",\n\r]/.test(guarded) ? '"' + guarded.replace(/"/g, '""') + '"' : guarded;
  };
  const text = [header, ...rows].map(row => row.map(cell).join(",")).join("\r\n") + "\r\n";
  document.documentElement.dataset.lastCsv = text.slice(0, 400);
  const link = h("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name + ".csv" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** A row of buttons of which one is pressed. */
function segments(label, options, pressed, onChange) {
  const group = h("span", { class: "segments", role: "group", "aria-label": label });
  for (const option of options) {
    const button = h("button", {
      type: "button", "aria-pressed": String(option.value === pressed), disabled: option.disabled,
      title: option.title, "data-value": option.value,
      onclick: () => {
        for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
        onChange(option.value);
      },
    }, option.label);
    group.append(button);
  }
  return group;
}

// --- figures -----------------------------------------------------------------------------------

const figures = new Set();
const PRINT_WIDTH = 680;  // CSS pixels that fit A4 and Letter between the margins
let printing = false;

function layoutOf(extra) {
  const axis = {
    gridcolor: style("--line"), zerolinecolor: style("--line"), linecolor: style("--line"),
    tickfont: { size: 11 }, title: { font: { size: 12 }, standoff: 8 }, automargin: true,
  };
  const axes = {};
  for (const name of ["xaxis", "yaxis"]) {
    const given = extra[name] || {};
    axes[name] = { ...axis, ...given, title: { ...axis.title, ...(given.title || {}) } };
  }
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: style("--text"), family: "system-ui, sans-serif", size: 12 },
    margin: { l: 54, r: 14, t: 10, b: 42 }, hovermode: "closest", dragmode: false,
    hoverlabel: { bgcolor: style("--panel"), bordercolor: style("--line"), font: { color: style("--text") }, align: "left" },
    ...extra, ...axes,
    ...(printing ? { width: PRINT_WIDTH } : { autosize: true }),
    legend: { orientation: "h", y: -0.22, font: { size: 11 }, traceorder: "normal", ...extra.legend },
  };
}

/**
 * A plot with a title, a caption and its data as CSV. `draw` returns {data, layout} and is called
 * again when the theme or the data changes; `csv` returns {header, rows}.
 */
function figure({ title, caption, name, height = 300, wide = false, draw, csv, onClick }) {
  const plot = h("div", { class: "plot", style: `height:${height}px` });
  const text = h("p", { class: "caption" }, caption || "");
  const button = h("button", {
    type: "button", class: "csv", title: "Download the data of this plot",
    onclick: () => { const { header, rows } = csv(); download(name, header, rows); },
  }, "CSV");
  const picture = h("button", {
    type: "button", class: "csv", title: "Download this plot as a picture",
    onclick: () => Plotly.downloadImage(plot, {
      format: "png", filename: name, width: plot.clientWidth, height: plot.clientHeight, scale: 2,
    }),
  }, "PNG");
  const root = h("div", { class: wide ? "figure wide" : "figure", "data-figure": name },
    h("header", {}, h("h3", {}, title), h("span", { class: "buttons" }, picture, csv ? button : null)), text, plot);
  const self = {
    root, plot,
    redraw() {
      const { data, layout, caption: now, height: tall } = draw();
      if (now !== undefined) text.textContent = now;
      if (tall) plot.style.height = tall + "px";
      Plotly.react(plot, data, layoutOf(layout || {}), {
        responsive: true, displayModeBar: false,
      });
    },
    mount() {
      self.redraw();
      if (onClick) plot.on("plotly_click", event => onClick(event.points[0], event));
      figures.add(self);
    },
    drop() { figures.delete(self); Plotly.purge(plot); },
  };
  return self;
}

/** Draw figures one after another, the first at once, so that the page answers early. */
function mountAll(parts) {
  const waiting = [...parts];
  const next = () => {
    const part = waiting.shift();
    if (part) part.mount();
    if (waiting.length) setTimeout(next); else document.documentElement.dataset.drawn = "true";
  };
  next();
  addEventListener("beforeprint", () => { while (waiting.length) waiting.shift().mount(); });
}

function message(title, ...text) {
  return h("div", { class: "figure" }, h("header", {}, h("h3", {}, title)), h("p", { class: "caption" }, text));
}

// --- theme -------------------------------------------------------------------------------------

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  for (const shown of figures) shown.redraw();
}

function wireTheme() {
  const wish = matchMedia("(prefers-color-scheme: dark)");
  let chosen = false;
  setTheme(wish.matches ? "dark" : "light");
  wish.addEventListener("change", event => { if (!chosen) setTheme(event.matches ? "dark" : "light"); });
  document.getElementById("theme").addEventListener("click", () => {
    chosen = true;
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  });
  document.getElementById("print").addEventListener("click", () => window.print());
  let before = "light";
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    for (const part of document.querySelectorAll("details")) part.open = true;
    printing = true;
    setTheme("light");
  });
  addEventListener("afterprint", () => { printing = false; setTheme(before); });
}

async function start(build) {
  try {
    wireTheme();
    const data = JSON.parse(document.getElementById("data").textContent);
    await unpackAll(data);
    document.getElementById("subtitle").textContent = data.subtitle;
    document.getElementById("loading").remove();
    build(data, document.getElementById("main"));
    performance.mark("ready");
    document.documentElement.dataset.ready = "true";
  } catch (error) {
    const place = document.getElementById("loading") || document.getElementById("main");
    place.append(h("p", { class: "note" },
      typeof DecompressionStream === "undefined"
        ? "This browser cannot unpack the page's data: use a browser of 2023 or later."
        : "The page could not be drawn: " + error));
    throw error;
  }
}
