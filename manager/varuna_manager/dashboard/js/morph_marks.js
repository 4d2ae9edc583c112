// Marks of morphs in charts: dashed lines, with their shapes above the chart.
import { colour } from "./charts.js";

const LABEL_PX = 40;
const LABEL_ROWS = 3;
const ROW_PX = 13;

export const vertical = (x) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: colour("line-strong"), width: 1, dash: "dash" } });

/** Labels above the chart, in as many rows as they need lest they cover each other; where three are not enough, the later ones stay. */
export function labelled(entries, begin, end, width, place) {
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
