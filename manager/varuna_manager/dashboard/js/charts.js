// Charts by plotly.js, which is loaded when the first one is drawn: pages are of use before. Each chart has a caption
// that says in words what is to be seen, and its figures as a table.
import { h, put, table } from "./dom.js";
import { describeFailure, retrySeconds, stateLine } from "./panels.js";
import { inTurn } from "./turns.js";

let loading = null;
const ALL = new Set();

function library() {
  loading ??= new Promise((resolve, reject) => {
    const script = h("script", { src: "static/plotly.min.js", on: {
      load: () => resolve(window.Plotly),
      error: () => { loading = null; script.remove(); reject(new Error("the chart library could not be fetched; the table below has the figures")); },
    } });
    document.head.append(script);
  });
  return loading;
}

/** A colour of the theme that holds now. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => ALL.forEach((redraw) => redraw()));

function layout(own) {
  const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line-strong"), automargin: true, fixedrange: false };
  const axes = Object.fromEntries(Object.entries(own).filter(([name]) => /^[xy]axis/.test(name))
    .map(([name, values]) => [name, { ...axis, ...values }]));
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified", showlegend: false,
    font: { color: colour("soft"), size: 12, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line-strong"), font: { color: colour("text") } },
    margin: { l: 10, r: 12, t: 24, b: 10 }, uirevision: "as the reader left it",
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
    ...own, ...axes,
  };
}

/** A chart in a figure; `columns` are those of its table. Draw it with {traces, layout, words, rows}. */
export function chart(label, columns, { height = 240, signal }) {
  const area = h("div", { class: "chart", role: "img", "aria-label": label });
  const caption = h("figcaption");
  const figuresTable = table(`${label}, as a table`, columns, { tall: true });
  const state = stateLine();
  let wanted = null;
  let waiting = false;
  let failures = 0;
  let retry = null;
  const fill = () => { if (details.open && wanted) figuresTable.fill(wanted.rows()); };
  const details = h("details", { on: { toggle: fill } }, h("summary", {}, "As a table"), figuresTable.element);

  async function paint(plotly) {
    waiting = false;
    try {
      if (signal.aborted || !wanted) return;
      const width = area.clientWidth || 600;
      await plotly.react(area, wanted.traces(width), layout({ height, ...wanted.layout(width) }),
        { displayModeBar: false, responsive: true, doubleClick: "reset" });
      // When the window changes its width, plotly takes the height from the page.
      area.style.height = `${area.layout.height}px`;
      area.classList.add("plotted");
      failures = 0;
      put(state);
    } catch (error) {
      fail(error);
    }
  }
  function fail(error) {
    waiting = false;
    if (signal.aborted) return;
    failures += 1;
    const seconds = retrySeconds(failures);
    put(state, describeFailure(error.message, null, seconds, () => { clearTimeout(retry); redraw(); }));
    retry = setTimeout(redraw, 1000 * seconds);
  }
  const redraw = () => {
    if (waiting || !wanted) return;
    waiting = true;
    library().then((plotly) => inTurn(() => paint(plotly)), fail);
  };
  ALL.add(redraw);
  signal.addEventListener("abort", () => { clearTimeout(retry); ALL.delete(redraw); if (window.Plotly) window.Plotly.purge(area); });

  return {
    element: h("figure", {}, state, area, caption, details),
    area,
    draw(content) {
      if (wanted === null) put(state, h("div", { class: "loading" }, "Loading the chart…"));
      wanted = content;
      put(caption, content.words);
      area.setAttribute("aria-label", `${label}. ${content.words}`);
      fill();
      redraw();
    },
  };
}

/** Some of many rows, evenly, and the last one. */
export function thinned(length, most = 60) {
  const step = Math.max(1, Math.ceil(length / most));
  return Array.from({ length }, (_, index) => index).filter((index) => index % step === 0 || index === length - 1);
}
