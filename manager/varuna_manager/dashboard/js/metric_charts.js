// The charts of a job's steps, or of several jobs' together: one card for each series that there is, with one set of
// controls. A morph is a line with the shape that begins there (Figure 8 of the paper).
import { chart, colour, thinned } from "./charts.js";
import { card, h } from "./dom.js";
import { clock, count, countOf, loss, number, seconds, shape } from "./format.js";
import { labelled, vertical } from "./morph_marks.js";
import { smoothed } from "./series.js";

const HEIGHT_PX = 330;
const COLOURS = ["op-f", "op-r", "op-b", "op-a", "mark-data", "mark-evaluation"];
/** What is known of some series; any other has its name as title. `byTime`: over time unless the reader chooses. `fromBefore`:
 * from the end of the step before. */
const KNOWN = {
  examples_per_s: { title: "Throughput", label: "examples/s", note: "examples/s of the whole job; dashed: a morph to the shape P×D", byTime: true, fromZero: true, perGpu: true, fromBefore: true, show: number },
  loss: { title: "Loss", label: "loss", note: "mean over the global batch", show: loss },
  gradient_norm: { title: "Gradient norm", label: "norm", note: "before clipping, over all parameters", show: loss },
  learning_rate: { title: "Learning rate", label: "learning rate", note: "of the first group of parameters", fromZero: true, show: (value) => number(value, 4) },
  step_s: { title: "Step time", label: "seconds", note: "from the end of a step to the end of the next", fromZero: true, fromBefore: true, show: seconds },
};
const ALWAYS = ["examples_per_s", "loss"];

/** `runs` to draw: {id, name, series, generations}. Controls and cards; further series get cards as they come. */
export function metricCharts(signal) {
  const options = { x: "fit", log: false, smoothing: 0 };
  const cards = new Map();
  const grid = h("div", { class: "columns" });
  let runs = [];
  const x = h("select", { id: "chart-x", on: { change: () => set("x", x.value) } },
    [["fit", "as fits"], ["step", "step"], ["time", "time"]].map(([value, text]) => h("option", { value }, text)));
  const log = h("input", { type: "checkbox", id: "chart-log", on: { change: () => set("log", log.checked) } });
  const smoothing = h("input", { type: "range", id: "chart-smoothing", min: "0", max: "0.98", step: "0.02", value: "0", on: { input: () => set("smoothing", Number(smoothing.value)) } });
  const csv = h("button", { type: "button", on: { click: () => download(runs) } }, "CSV");
  const controls = h("div", { class: "controls", role: "group", "aria-label": "Charts" }, h("label", { for: "chart-x" }, "x-axis"), x,
    h("span", {}, log, " ", h("label", { for: "chart-log" }, "log scale")), h("label", { for: "chart-smoothing" }, "smoothing"), smoothing, csv);

  function set(name, value) { options[name] = value; redraw(); }
  function redraw() {
    const names = new Set([...ALWAYS, ...runs.flatMap((run) => run.series.names)]);
    for (const name of new Set([...Object.keys(KNOWN).filter((one) => names.has(one)), ...names])) {
      if (!cards.has(name)) add(name);
      cards.get(name).draw(contentOf(name, runs, options));
    }
  }
  function add(name) {
    const { title = name, note = "logged by the script" } = KNOWN[name] ?? {};
    const columns = [{ title: "Job" }, { title: "Time", kind: "nowrap" }, { title: "Steps", kind: "num" }, { title: "P×D" }, { title, kind: "num" }];
    const drawn = chart(`${title} by step`, columns, { height: HEIGHT_PX, signal });
    cards.set(name, drawn);
    grid.append(card(title, h("span", { class: "note" }, note), drawn.element));
  }
  ALWAYS.forEach(add);
  const element = h("section", { class: "charts", "aria-label": "Charts of the steps" }, controls, grid);
  return { element, draw(wanted) { runs = wanted; redraw(); } };
}

function contentOf(name, runs, options) {
  const kind = { label: name, show: (value) => number(value, 4), ...KNOWN[name] };
  const byTime = options.x === "fit" ? Boolean(kind.byTime) : options.x === "time";
  const drawn = runs.map((run, index) => ({ ...run, color: colour(COLOURS[index % COLOURS.length]), ...valuesOf(run, name) }));
  return {
    words: drawn.map((run) => describe(run, kind, drawn.length > 1)).join(" ") || "No steps yet.",
    rows: () => drawn.flatMap((run) => thinned(run.points.length).map((index) => run.points[index]).map((point) => [
      run.name, clock(point.at), steps(point), shapeOf(run, point), kind.show(point.values[name][1])])),
    traces: () => drawn.flatMap((run) => lines(run, kind, options, placeOf(byTime, runs.length > 1 ? begin(run) : 0), runs.length > 1)),
    layout: (width) => layoutOf(drawn, kind, options, byTime, width),
  };
}

function valuesOf({ series, generations }, name) {
  const all = series.pointsOf(name);
  const training = generations.filter((one) => one.kind === "training");
  const byNumber = new Map(training.map((one) => [one.number, one]));
  const points = KNOWN[name]?.fromBefore ? all.filter((point, index) => all[index + 1]?.generation !== point.generation || !isFirstStep(point, byNumber.get(point.generation))) : all;
  return { points, isDownSampled: series.isDownSampled && !series.isLogged(name), training, byNumber, of: (point) => point.values[name] };
}

/** Nothing precedes a generation's first step, so that its time is without what lies between steps. */
const isFirstStep = (point, generation) => generation && point.first === point.last && point.first === (generation.resumed_step ?? 0) + 1;

const steps = (point) => (point.first === point.last ? count(point.last) : `${count(point.first)}–${count(point.last)}`);
const begin = (run) => run.series.points[0]?.at ?? 0;
const shapeOf = ({ byNumber }, point) => { const one = byNumber.get(point.generation); return one ? shape(one.p, one.d) : "–"; };

/** Where a point stands: its step, its moment, or where jobs are compared the hours since their first step. */
function placeOf(byTime, since) {
  if (!byTime) return (point) => point.last;
  return since ? (point) => (point.at - since) / 3_600_000 : (point) => new Date(point.at);
}

function describe(run, kind, named) {
  const who = named ? `${run.name}: ` : "";
  if (!run.points.length) return `${who}No steps yet.`;
  const [first, last] = [run.points[0], run.points.at(-1)];
  const range = `from ${kind.show(run.of(first)[1])} at step ${count(first.first)} to ${kind.show(run.of(last)[1])} at step ${count(last.last)}`;
  const shapes = run.training.slice(-8).map((one) => shape(one.p, one.d));
  const morphed = kind.perGpu ? `; ${countOf(Math.max(0, run.training.length - 1), "morph")}${shapes.length ? `: ${shapes.join(" → ")}` : ""}` : "";
  return `${who || ""}${who ? range : range[0].toUpperCase() + range.slice(1)}${morphed}.${run.isDownSampled ? " Each point is many steps; the band is from the least to the greatest." : ""}`;
}

/** The line, broken where generations follow each other; a band behind means; where it is smoothed, the raw line faintly. */
function lines(run, kind, options, place, compared) {
  const columns = (values) => ({ x: broken(run.points, place), y: brokenValues(run.points, values), text: broken(run.points, (point) => `step ${steps(point)}`) });
  const means = run.points.map((point) => run.of(point)[1]);
  const line = (values, name, extra) => ({ ...columns(values), name, type: "scatter", connectgaps: false, mode: run.points.length < 3 ? "markers" : "lines",
    line: { color: run.color, width: 1.8 }, hovertemplate: `%{y:.5~g} · %{text}`, showlegend: compared, ...extra });
  const made = [];
  if (run.isDownSampled && !compared && !options.smoothing) made.push(...spreadBand(run, place));
  if (options.smoothing) made.push(line(means, `${run.name} raw`, { opacity: 0.28, hoverinfo: "skip", hovertemplate: null, showlegend: false }));
  made.push(line(smoothed(means, options.smoothing), compared ? run.name : kind.label, {}));
  if (kind.perGpu && !compared) made.push(line(smoothed(perGpu(run), options.smoothing), "per GPU", { yaxis: "y2", line: { color: colour("op-b"), width: 1.8 } }));
  return made;
}

function perGpu(run) {
  // The first bucket of a generation may have steps of the one before, on another number of GPUs.
  return run.points.map((point, index) => {
    const one = run.byNumber.get(point.generation);
    const isMixed = run.isDownSampled && index && run.points[index - 1].generation !== point.generation;
    return one && !isMixed ? run.of(point)[1] / (one.p * one.d) : null;
  });
}

const begins = (points, index) => index && points[index - 1].generation !== points[index].generation;
const broken = (points, of) => points.flatMap((point, index) => (begins(points, index) ? [null, of(point)] : [of(point)]));
const brokenValues = (points, values) => values.flatMap((value, index) => (begins(points, index) ? [null, value] : [value]));

function spreadBand(run, place) {
  const edge = (index, extra) => ({
    x: run.points.map(place), y: run.points.map((point) => run.of(point)[index]), type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip", ...extra });
  return [edge(0, {}), edge(2, { fill: "tonexty", fillcolor: `${run.color}2e` })];
}

function layoutOf(drawn, kind, options, byTime, width) {
  if (!drawn.some((run) => run.points.length)) return { height: 180, xaxis: { visible: false }, yaxis: { visible: false } };
  const compared = drawn.length > 1;
  const y = { title: { text: kind.label }, ...(options.log ? { type: "log" } : kind.fromZero ? { rangemode: "tozero" } : {}) };
  const split = kind.perGpu && !compared;
  const xaxis = !byTime ? { title: { text: "step" }, tickformat: ",d" } : compared ? { title: { text: "hours since the first step" } } : { type: "date" };
  const axes = { xaxis: { ...xaxis, ...(split ? { anchor: "y2" } : {}) }, yaxis: split ? { ...y, domain: [0.46, 1] } : y,
    ...(split ? { yaxis2: { ...y, title: { text: "per GPU" }, domain: [0, 0.38], nticks: 4 } } : {}) };
  if (compared) return { ...axes, showlegend: true, legend: { orientation: "h", y: 1.12 }, uirevision: `${options.x} ${options.log}` };
  return { ...axes, ...marks(drawn[0], kind, byTime, width), uirevision: `${options.x} ${options.log}` };
}

/** The morphs of a job that is alone in its chart. */
function marks(run, kind, byTime, width) {
  if (!run) return {};
  const started = run.training.filter((one) => one.started_at);
  const entries = started.map((one) => [byTime ? Date.parse(one.started_at) : one.resumed_step ?? 0, shape(one.p, one.d)]);
  const shown = kind.perGpu || byTime ? entries : entries.slice(1);
  const place = byTime ? (at) => new Date(at) : (step) => step;
  const edge = (point) => (byTime ? point?.at : point?.last);
  const first = Math.min(shown[0]?.[0] ?? Infinity, edge(run.points[0]) ?? Infinity);
  return { shapes: shown.map(([at]) => vertical(place(at))), ...labelled(shown, first, edge(run.points.at(-1)) ?? first, width, place) };
}

/** What the charts show, as a file. */
function download(runs) {
  const names = [...new Set(runs.flatMap((run) => run.series.names))];
  const head = ["job", "first_step", "last_step", "at", "generation", ...names.flatMap((name) => [name, `${name}_min`, `${name}_max`])];
  const quoted = (value) => (/[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value ?? "");
  const rows = runs.flatMap((run) => run.series.all.map((point) => [run.name, point.first, point.last, new Date(point.at).toISOString(), point.generation,
    ...names.flatMap((name) => { const [low, mean, high] = point.values[name] ?? []; return [mean, low, high]; })]));
  const address = URL.createObjectURL(new Blob([[head, ...rows].map((row) => row.map(quoted).join(",")).join("\n"), "\n"], { type: "text/csv" }));
  const file = h("a", { href: address, download: `${runs.map((run) => run.name).join("-")}-steps.csv` });
  file.click();
  URL.revokeObjectURL(address);
}
