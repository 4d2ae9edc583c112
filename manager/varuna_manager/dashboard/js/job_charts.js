// Examples/s, per GPU, and the loss. Each morph is a line with the shape that begins there (Figure 8 of the paper).
import { chart, colour, thinned } from "./charts.js";
import { card, h } from "./dom.js";
import { clock, count, loss, number, shape } from "./format.js";

const LABEL_PX = 40;
const LABEL_ROWS = 3;
const ROW_PX = 13;

export function rateAndLoss(signal) {
  const rate = chart("Examples per second over time", [{ title: "Time", kind: "nowrap" }, { title: "Steps", kind: "num" }, { title: "P×D" },
    { title: "Examples/s", kind: "num" }, { title: "per GPU", kind: "num" }], { height: 330, signal });
  const losses = chart("Loss by step", [{ title: "Step", kind: "num" }, { title: "Generation", kind: "num" }, { title: "Loss", kind: "num" }], { height: 330, signal });
  return {
    element: h("div", { class: "columns" },
      card("Throughput", h("span", { class: "note" }, "examples/s, and per GPU; dashed: a morph to the shape P×D"), rate.element),
      card("Loss", h("span", { class: "note" }, "mean over the global batch"), losses.element)),
    draw({ series, generations }) {
      const { points } = series;
      const training = generations.filter((one) => one.kind === "training");
      const of = new Map(training.map((one) => [one.number, one]));
      rate.draw(rateContent(points, training, of, series.isDownSampled));
      losses.draw(lossContent(points, training, series.isDownSampled));
    },
  };
}

/** Columns in which the line breaks where one generation follows another. */
function broken(points, of) {
  const made = [];
  points.forEach((point, index) => {
    if (index && points[index - 1].generation !== point.generation) made.push(null);
    made.push(of(point));
  });
  return made;
}

function rateContent(points, training, of, isDownSampled) {
  const gpus = (point) => { const one = of.get(point.generation); return one ? one.p * one.d : null; };
  const starts = training.filter((one) => one.started_at).map((one) => ({ at: Date.parse(one.started_at), text: shape(one.p, one.d) }));
  // The first bucket of a generation may have steps of the one before, on another number of GPUs.
  const mixed = new Set(isDownSampled ? points.filter((point, index) => index && points[index - 1].generation !== point.generation) : []);
  const perGpu = (point) => (gpus(point) && !mixed.has(point) ? point.rate[1] / gpus(point) : null);
  const newest = points.at(-1);
  const morphs = Math.max(0, starts.length - 1);
  return {
    words: newest
      ? `${count(newest.last)} steps; newest point ${number(newest.rate[1])} examples/s${gpus(newest) ? `, ${number(newest.rate[1] / gpus(newest))} per GPU` : ""}; ${morphs} ${morphs === 1 ? "morph" : "morphs"}${starts.length ? `: ${starts.slice(-8).map((one) => one.text).join(" → ")}` : ""}.`
      : "No steps yet.",
    rows: () => thinned(points.length).map((index) => points[index]).map((point) => [
      clock(point.at), steps(point), of.has(point.generation) ? shape(of.get(point.generation).p, of.get(point.generation).d) : "–",
      number(point.rate[1]), number(perGpu(point))]),
    traces: () => {
      const x = broken(points, (point) => new Date(point.at));
      const what = broken(points, (point) => `step ${steps(point)}`);
      const line = (name, y, color, extra) => ({
        x, y, name, text: what, type: "scatter", mode: points.length < 3 ? "markers" : "lines", connectgaps: false,
        line: { color, width: 1.8 }, hovertemplate: "%{y:.4~g} · %{text}", ...extra });
      const band = isDownSampled ? spreadBand(points, (point) => point.rate, (point) => new Date(point.at), colour("op-f")) : [];
      return [...band, line("examples/s", broken(points, (point) => point.rate[1]), colour("op-f")),
        line("per GPU", broken(points, perGpu), colour("op-b"), { yaxis: "y2" })];
    },
    layout: (width) => {
      const begin = Math.min(starts[0]?.at ?? Infinity, points[0]?.at ?? Infinity);
      const end = newest?.at ?? begin;
      return {
        xaxis: { type: "date", anchor: "y2" },
        yaxis: { domain: [0.46, 1], rangemode: "tozero", title: { text: "examples/s" } },
        yaxis2: { domain: [0, 0.38], rangemode: "tozero", title: { text: "per GPU" }, nticks: 4 },
        shapes: starts.map((one) => vertical(new Date(one.at))),
        ...labelled(starts.map((one) => [one.at, one.text]), begin, end, width, (at) => new Date(at)),
      };
    },
  };
}

function lossContent(points, training, isDownSampled) {
  const known = points.filter((point) => point.loss[1] !== null);
  const [first, last] = [known[0], known.at(-1)];
  const starts = training.filter((one) => one.started_at).map((one) => [one.resumed_step ?? 0, shape(one.p, one.d)]);
  return {
    words: known.length ? `From ${loss(first.loss[1])} at step ${count(first.first)} to ${loss(last.loss[1])} at step ${count(last.last)}.${isDownSampled ? " Each point is many steps; the band is from the least to the greatest." : ""}` : "No steps yet.",
    rows: () => thinned(known.length).map((index) => known[index]).map((point) => [steps(point), point.generation, loss(point.loss[1])]),
    traces: () => [
      ...(isDownSampled ? spreadBand(known, (point) => point.loss, (point) => point.last, colour("op-f")) : []),
      { x: known.map((point) => point.last), y: known.map((point) => point.loss[1]), name: "loss", type: "scatter", mode: known.length < 3 ? "markers" : "lines",
        line: { color: colour("op-f"), width: 1.8 }, hovertemplate: "%{y:.5~g}" }],
    layout: (width) => ({
      xaxis: { title: { text: "step" }, tickformat: ",d" }, yaxis: { title: { text: "loss" } },
      shapes: starts.slice(1).map(([step]) => vertical(step)),
      ...labelled(starts.slice(1), first?.first ?? 0, last?.last ?? 1, width, (step) => step),
    }),
  };
}

const steps = (point) => (point.first === point.last ? count(point.last) : `${count(point.first)}–${count(point.last)}`);

/** From the least to the greatest of each bucket, behind the line of the means. */
function spreadBand(points, of, x, color) {
  const edge = (index, extra) => ({
    x: points.map(x), y: points.map((point) => of(point)[index]), type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip", ...extra });
  return [edge(0, {}), edge(2, { fill: "tonexty", fillcolor: `${color}2e` })];
}

const vertical = (x) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: colour("line-strong"), width: 1, dash: "dash" } });

/** Labels above the chart, in as many rows as they need lest they cover each other; where three are not enough, the later ones stay. */
function labelled(entries, begin, end, width, place) {
  const room = ((end - begin) * LABEL_PX) / Math.max(width - 60, 100);
  const left = Array(LABEL_ROWS).fill(Infinity); // of each row, where its leftmost label stands
  const annotations = [];
  for (const [x, text] of [...entries].reverse()) {
    const row = left.findIndex((other) => other - x >= room);
    if (row < 0) continue;
    left[row] = x;
    annotations.push({ x: place(x), y: 1, yref: "paper", yanchor: "bottom", yshift: row * ROW_PX, text, showarrow: false, font: { size: 11, color: colour("text") } });
  }
  const rows = left.filter((x) => x !== Infinity).length;
  return { annotations, margin: { l: 10, r: 12, t: 12 + ROW_PX * Math.max(1, rows), b: 10 } };
}
