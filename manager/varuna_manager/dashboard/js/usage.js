// How busy a VM has been: processors, memory, network, GPUs, over time.
import { get } from "./api.js";
import { chart, colour, thinned } from "./charts.js";
import { card, h } from "./dom.js";
import { bytes, clock, percent } from "./format.js";

const HEIGHT_PX = 210;
const rate = (value) => (value === null ? "–" : `${bytes(Math.round(value))}/s`);
/** Each chart: lines of [column, name, colour]; `whole`: the column that is the most there is. */
const CHARTS = [
  { title: "Processors", note: "share of all", lines: [["cpu_share", "busy", "op-f"]], show: percent, share: true },
  { title: "Memory", note: "dashed: all there is", lines: [["memory_used_bytes", "used", "op-b"]], whole: "memory_bytes", show: bytes },
  { title: "Network", note: "all interfaces", lines: [["received_bytes_per_s", "received", "op-f"], ["sent_bytes_per_s", "sent", "op-r"]], show: rate },
  { title: "GPUs", note: "share of the time in which they computed", lines: [["gpu_share", "busy", "op-f"]], show: percent, share: true },
  { title: "GPU memory", note: "dashed: all there is", lines: [["gpu_memory_used_bytes", "used", "op-b"]], whole: "gpu_memory_bytes", show: bytes },
];

export function usage(vm, signal) {
  const element = h("div", { class: "columns narrow" });
  const cards = CHARTS.map((one) => {
    const columns = [{ title: "Time", kind: "nowrap" }, ...one.lines.map(([, name]) => ({ title: name, kind: "num" }))];
    const drawn = chart(`${one.title} over time`, columns, { height: HEIGHT_PX, signal });
    return { one, drawn, element: card(one.title, h("span", { class: "note" }, one.note), drawn.element) };
  });
  element.append(...cards.map((each) => each.element));
  return {
    element,
    async refresh() {
      const found = await get(`vms/${encodeURIComponent(vm)}/usage`, signal);
      for (const { one, drawn, element: place } of cards) {
        const isKnown = one.lines.some(([column]) => found[column].some((value) => value !== null));
        place.hidden = !isKnown && one.title.startsWith("GPU"); // a machine without them has no such charts
        if (!place.hidden) drawn.draw(contentOf(one, found));
      }
    },
  };
}

function contentOf(one, found) {
  const x = found.at_unix_s.map((at) => new Date(1000 * at));
  const newest = one.lines.map(([column, name]) => `${name} ${one.show(found[column].at(-1) ?? null)}`).join(", ");
  const total = one.whole ? found[one.whole].at(-1) : null;
  const line = (y, name, color, extra) => ({ x, y, name, type: "scatter", mode: x.length < 3 ? "markers" : "lines", line: { color: colour(color), width: 1.8 },
    text: y.map((value) => one.show(value)), hovertemplate: `%{text} ${name}<extra></extra>`, ...extra });
  const highest = Math.max(total ?? 0, ...one.lines.flatMap(([column]) => found[column]));
  return {
    words: x.length ? `Newest: ${newest}${total ? ` of ${bytes(total)}` : ""}.` : "Nothing measured yet: the first values come within half a minute.",
    rows: () => thinned(x.length, 90).reverse().map((index) => [clock(x[index]), ...one.lines.map(([column]) => one.show(found[column][index]))]),
    traces: () => [...one.lines.map(([column, name, color], index) => line(found[column], name, color, index || one.lines.length > 1 ? {} : { fill: "tozeroy", fillcolor: `${colour(color)}1c` })),
      ...(total ? [line(found[one.whole], "in all", "soft", { line: { color: colour("line-strong"), width: 1, dash: "dash" } })] : [])],
    layout: () => ({ xaxis: { type: "date" }, yaxis: one.share ? { range: [0, 1], tickformat: ".0%" } : { rangemode: "tozero", ...byteTicks(highest, one.show) },
      showlegend: one.lines.length > 1, legend: { orientation: "h", y: 1.15 } }),
  };
}

/** Round numbers of bytes: four or so powers or halves of them. */
function byteTicks(highest, show) {
  if (!(highest > 0)) return { tickvals: [0], ticktext: [show(0)] };
  const step = 2 ** Math.round(Math.log2(highest / 4));
  const values = Array.from({ length: Math.floor(highest / step) + 1 }, (_, index) => index * step);
  return { tickvals: values, ticktext: values.map((value) => show(value)) };
}
