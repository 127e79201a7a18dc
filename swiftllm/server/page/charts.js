"use strict";
// Draws in SVG. Text goes into text nodes only, so the name of a model or request is never markup.

const SVG = "http://www.w3.org/2000/svg";

function svgElement(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (parent) parent.append(element);
  return element;
}

function svgText(parent, x, y, words, attributes = {}) {
  svgElement("text", { x, y, ...attributes }, parent).textContent = words;
}

function htmlElement(name, className, words = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.textContent = words;
  return element;
}

function legendItem(series, value) {
  const item = htmlElement("li");
  item.append(htmlElement("i", series.colour), series.title);
  if (value !== undefined) item.append(" ", htmlElement("b", "", value));
  return item;
}

// The smallest of 1, 2, 5, 10, ... that is not below the argument.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

function format(value, unit = "") {
  if (value === null || !Number.isFinite(value)) return "–";
  const digits = Math.abs(value) >= 100 || Number.isInteger(value) ? 0 : Math.abs(value) >= 10 || unit === "%" ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits }) + unit;
}

// A card with one chart over time. `series` have a title, a colour and a value(before, after) of two samples;
// stacked series are areas on top of each other, the others lines.
class Chart {
  constructor(parent, { title, unit = "", series, stacked = false, largest = null, onHover }) {
    Object.assign(this, { unit, series, stacked, largest });
    this.card = htmlElement("article", "card");
    this.holder = htmlElement("div");
    this.legend = htmlElement("ul", "legend");
    this.card.append(htmlElement("h3", "", title), this.legend, this.holder);
    parent.append(this.card);
    this.holder.addEventListener("pointermove", (event) => {
      const box = this.holder.getBoundingClientRect();
      onHover((event.clientX - box.left) / box.width);
    });
    this.holder.addEventListener("pointerleave", () => onHover(null));
  }

  // `samples`: rows as objects; `span_s`: seconds across the width; `cursor`: 0 to 1 across it, or null.
  draw(samples, span_s, cursor) {
    const width = this.holder.clientWidth || 340, height = 108, top = 6, bottom = 16;
    const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height + bottom}`, height: height + bottom, "aria-hidden": true });
    const end_s = samples.length ? samples.at(-1).time_s : 0;
    const points = samples.slice(1).map((after, i) => ({
      x: width * (1 - (end_s - after.time_s) / span_s),
      values: this.series.map((one) => one.value(sampleBefore(samples, i + 1), after)),
    }));
    const heights = points.map((point) => this.stacked ? point.values.reduce((a, b) => a + (b || 0), 0) : Math.max(...point.values.map((v) => v || 0)));
    const most = this.largest ?? roundUp(Math.max(0, ...heights));
    const y = (value) => top + (height - top) * (1 - Math.min(value, most) / most);
    for (const part of [0, 0.5, 1]) svgElement("line", { x1: 0, x2: width, y1: y(part * most), y2: y(part * most), class: "grid" }, svg);
    if (points.length > 1) this.stacked ? this.areas(svg, points, y) : this.lines(svg, points, y);
    svgText(svg, 3, y(most) + 11, format(most, this.unit));
    svgText(svg, 0, height + 13, span_s > 60 ? `${span_s / 60} minutes ago` : "a minute ago");
    svgText(svg, width, height + 13, "now", { "text-anchor": "end" });
    const shown = cursor === null ? points.at(-1) : nearest(points, cursor * width);
    if (cursor !== null && shown) svgElement("line", { x1: shown.x, x2: shown.x, y1: top, y2: height, class: "cursor" }, svg);
    this.holder.replaceChildren(svg);
    this.legend.replaceChildren(...this.series.map((one, i) => legendItem(one, format(shown ? shown.values[i] : null, this.unit))));
  }

  areas(svg, points, y) {
    let below = points.map(() => 0);
    this.series.forEach((one, i) => {
      const above = points.map((point, k) => below[k] + (point.values[i] || 0));
      const up = points.map((point, k) => `${point.x.toFixed(1)},${y(above[k]).toFixed(1)}`);
      const down = points.map((point, k) => `${point.x.toFixed(1)},${y(below[k]).toFixed(1)}`).reverse();
      svgElement("path", { d: `M${up.join("L")}L${down.join("L")}Z`, class: `area ${one.colour}` }, svg);
      below = above;
    });
  }

  lines(svg, points, y) {
    this.series.forEach((one, i) => {
      let path = "", pen = "M";
      for (const point of points) {
        const value = point.values[i];
        if (value === null) { pen = "M"; continue; }
        path += `${pen}${point.x.toFixed(1)},${y(value).toFixed(1)}`;
        pen = "L";
      }
      svgElement("path", { d: path, class: `stroke ${one.colour}${one.dashed ? " dashed" : ""}` }, svg);
    });
  }
}

// The earlier sample of a rate: the one three seconds before, or, if an iteration takes longer, the last one with
// fewer iterations.
function sampleBefore(samples, index) {
  const after = samples[index], works = after.running_gpu + after.running_cpu + after.waiting > 0;
  let before = Math.max(0, index - 3);
  while (works && before > 0 && samples[before].iterations === after.iterations && after.time_s - samples[before].time_s < 30) before--;
  return samples[before];
}

function nearest(points, x) {
  return points.reduce((best, point) => (!best || Math.abs(point.x - x) < Math.abs(best.x - x) ? point : best), null);
}

const SPAN_COLOURS = {
  linear: "c-gpu", attention: "c-gpu-soft", step: "c-pipe", wait: "c-bad", swap_wait: "c-bad", swap: "c-swap", other: "c-line",
  to_host: "c-swap", to_gpu: "c-swap",
};
const CPU_BATCH_COLOURS = ["c-cpu", "c-cpu-soft"]; // successive CPU batches alternate; letters name them too

// One iteration: a row for each worker, with its activity over time.
function drawGantt(holder, timeline) {
  const width = holder.clientWidth || 1100, beside = width > 700; // titles stand beside the rows, or else above them
  const label = beside ? 190 : 0, head = beside ? 0 : 16, row = 26, gap = 7;
  const height = timeline.rows.length * (head + row + gap);
  const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height + 18}`, height: height + 18, role: "img", "aria-label": "Timeline of one iteration" });
  const scale = (width - label) / timeline.duration_ms;
  timeline.rows.forEach(({ title, spans }, index) => {
    const y = index * (head + row + gap) + head;
    svgText(svg, 0, beside ? y + row / 2 + 4 : y - 4, title);
    svgElement("line", { x1: label, x2: width, y1: y + row, y2: y + row, class: "grid" }, svg);
    for (const [start, duration, kind, letters, words] of spans) {
      const from = Math.max(0, start), to = Math.min(timeline.duration_ms, start + duration);
      if (to <= from) continue;
      const cpuBatch = CPU_BATCH_COLOURS[letters ? (letters.charCodeAt(0) + 1) % 2 : 0];
      const x = label + from * scale, wide = Math.max(0.6, (to - from) * scale - 0.4);
      const box = { x, y, width: wide, height: row, class: SPAN_COLOURS[kind] || cpuBatch };
      svgElement("title", {}, svgElement("rect", box, svg)).textContent = `${words}\n${format(duration)} ms, from ${format(start)} ms`;
      if (kind === "linear" && letters) svgElement("rect", { ...box, y: y + row - 7, height: 7, class: cpuBatch, "pointer-events": "none" }, svg);
      if (kind === "cpu_attention" && wide > 9) svgText(svg, x + wide / 2, y + row / 2 + 4, letters, { "text-anchor": "middle", class: "in-box" });
    }
  });
  svgText(svg, label, height + 12, "0");
  svgText(svg, width, height + 12, `${format(timeline.duration_ms)} ms`, { "text-anchor": "end" });
  holder.replaceChildren(svg);
}
