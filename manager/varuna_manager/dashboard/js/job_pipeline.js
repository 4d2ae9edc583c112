// The pipeline of the last traced mini-batch, a row for each stage (Figure 7 of the paper).
import { chart, colour } from "./charts.js";
import { card, h, put, vmLink } from "./dom.js";
import { age, count, percent, seconds, shape } from "./format.js";

const OPS = [["F", "forward", "op-f", ""], ["R", "recompute", "op-r", "/"], ["B", "backward", "op-b", ""], ["A", "all-reduce", "op-a", "x"]];
const MOST_LABELLED = 400;

export function pipeline(signal) {
  const note = h("span", { class: "note" });
  const legend = h("div", { class: "note" });
  const gantt = chart("Pipeline of the last traced mini-batch", [{ title: "Stage", head: true }, { title: "Rank", kind: "num" }, { title: "VM" },
    { title: "Forward", kind: "num" }, { title: "Recompute", kind: "num" }, { title: "Backward", kind: "num" }, { title: "All-reduce", kind: "num" }, { title: "Busy", kind: "num" }], { signal });
  const none = h("p", { class: "empty" }, "No mini-batch was traced yet: the third step of each generation is, and then every hundredth.");
  const body = h("div", { hidden: true }, gantt.element);
  let shownStep = null;
  return {
    element: card("Pipeline", [note, h("span", { class: "grow" }), legend], none, body),
    draw(trace) {
      none.hidden = trace !== null;
      body.hidden = trace === null;
      if (trace === null) return;
      put(note, `step ${count(trace.step)} of generation ${trace.generation}, ${shape(trace.p, trace.d)}, replica 0, traced ${age(trace.at)}`);
      put(legend, OPS.map(([letter, word, tone]) => h("span", { class: "key" }, swatch(tone), `${letter} ${word}`)));
      const key = `${trace.generation}/${trace.step}/${trace.stages.length}`; // one stage may tell of it after another
      if (key !== shownStep) { shownStep = key; gantt.draw(content(trace)); }
    },
  };
}

function swatch(tone) {
  const made = h("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = `var(--${tone})`;
  return made;
}

function content(trace) {
  const stages = trace.stages.map((stage) => ({
    ...stage, spans: [...stage.ops.map(([op, batch, start, us]) => [op, `${op}${batch}`, start, us]), ...stage.all_reduce.map(([name, start, us]) => ["A", name, start, us])],
  }));
  const sum = (stage, op) => stage.spans.filter((span) => span[0] === op).reduce((total, span) => total + span[3], 0);
  const busy = (stage) => sum(stage, "F") + sum(stage, "R") + sum(stage, "B");
  const share = stages.reduce((total, stage) => total + busy(stage), 0) / Math.max(1, stages.length * trace.span_us);
  const all = stages.reduce((total, stage) => total + stage.spans.length, 0);
  return {
    words: `${seconds(trace.span_us / 1e6)} from the first op to the end of the last; the stages compute ${percent(share)} of it, and ${percent(1 - share)} is bubbles and waiting.`,
    rows: () => stages.map((stage) => [stage.stage, stage.rank, vmLink(stage.vm_id),
      ...["F", "R", "B", "A"].map((op) => seconds(sum(stage, op) / 1e6)), percent(busy(stage) / trace.span_us)]),
    traces: () => OPS.map(([op, word, tone, pattern]) => {
      const spans = stages.flatMap((stage) => stage.spans.filter((span) => span[0] === op).map((span) => [stage.stage, ...span]));
      return {
        type: "bar", orientation: "h", name: word, y: spans.map((span) => `stage ${span[0]}`), base: spans.map((span) => span[3] / 1000), x: spans.map((span) => span[4] / 1000),
        text: spans.map((span) => span[2]), textposition: all <= MOST_LABELLED ? "inside" : "none", insidetextanchor: "middle", textangle: 0, constraintext: "inside",
        insidetextfont: { color: colour("on-accent"), size: 11 }, width: op === "A" ? 0.3 : 0.8, offset: op === "A" ? -0.15 : -0.4,
        marker: { color: colour(tone), line: { color: colour("card"), width: all <= MOST_LABELLED ? 1 : 0 }, pattern: all <= 3000 ? { shape: pattern, fillmode: "overlay", fgcolor: colour("card"), fgopacity: 0.45, size: 6, solidity: 0.25 } : undefined },
        hovertemplate: `%{text} ${word} on %{y}<br>from %{base:.2f} ms, for %{x:.3f} ms<extra></extra>`,
      };
    }),
    layout: () => ({
      height: 90 + Math.min(900, Math.max(34, 220 / stages.length) * stages.length), barmode: "overlay", hovermode: "closest", bargap: 0.15, margin: { l: 10, r: 12, t: 6, b: 10 }, uniformtext: { minsize: 9, mode: "hide" },
      xaxis: { title: { text: "ms from the first op" }, rangemode: "tozero" },
      yaxis: { autorange: "reversed", type: "category", categoryorder: "array", categoryarray: stages.map((stage) => `stage ${stage.stage}`), showgrid: false },
    }),
  };
}
