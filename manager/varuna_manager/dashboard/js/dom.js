// Elements, tables and states. What comes from the manager goes in as text, never as markup.
import { age, clock, fullTime, loss } from "./format.js";

/** An element: `props` are attributes, `on` its listeners, `class` its classes; children are text, nodes or lists. */
export function h(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

// A symbol and a tone beside each state's word: none is told by colour alone.
const STATES = {
  queued: ["…", "info"], running: ["▶", "good"], cancelling: ["◐", "warn"], succeeded: ["✔", "good"],
  failed: ["✘", "bad"], cancelled: ["■", "quiet"],
  launching: ["…", "info"], stopping: ["◐", "warn"], ended: ["○", "quiet"],
  requested: ["…", "info"], ready: ["●", "good"], suspect: ["?", "warn"], draining: ["◐", "warn"],
  lost: ["✘", "bad"], gone: ["○", "quiet"],
  assigned: ["…", "info"], exited: ["○", "quiet"],
  slow: ["▼", "warn"], quarantined: ["⊘", "warn"], cordoned: ["⊘", "warn"], "notice given": ["!", "bad"], fits: ["✔", "good"], chosen: ["★", "good"],
  "succeeded, but": ["!", "warn"],
  "too large": ["✘", "bad"], "predicted slower": ["▼", "quiet"],
};

export const tone = (name) => (STATES[name] ?? ["·", "quiet"])[1];
export const symbol = (name) => (STATES[name] ?? ["·", "quiet"])[0];

export function state(name, word = name) {
  return h("span", { class: `state ${tone(name)}` }, h("span", { "aria-hidden": "true" }, symbol(name)), word);
}

/** A job's state. A success with steps that were not finite does not look like another. */
export function jobState({ state: name, not_finite_from: since, steps_skipped: skipped }) {
  return name === "succeeded" && (since !== null || skipped > 0) ? state("succeeded, but", name) : state(name);
}

/** A job's newest loss, red if it or the gradient is not finite. */
export function jobLoss({ loss: value, not_finite_from: since }) {
  return since === null ? loss(value) : h("span", { class: "wrong" }, value === null ? "not finite" : loss(value));
}

const time = (at, text) => (at === null || at === undefined ? "–" : h("time", { datetime: new Date(at).toISOString(), title: fullTime(at) }, text));
/** A moment as a clock shows it, or as "3 min ago"; with its date and zone when it is pointed at. */
export const when = (at) => time(at, clock(at));
export const ago = (at) => time(at, age(at));

export const link = (href, text) => h("a", { href }, text);
export const jobLink = (id, name) => link(`#/jobs/${encodeURIComponent(id)}`, name);
export const vmLink = (id) => (id ? link(`#/vms/${encodeURIComponent(id)}`, id) : "–");

/** The jobs that these workers are of, by name. */
export function jobsOf(workers) {
  const names = new Map(workers.map((worker) => [worker.job_id, worker.job_name]));
  return [...names].flatMap(([id, name], index) => [index ? ", " : "", jobLink(id, name)]);
}

/** A headed part of a page. Returns the section; put what follows its heading into it. */
export function card(title, extra = [], ...children) {
  const id = `t-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return h("section", { class: "card", "aria-labelledby": id }, h("header", {}, h("h2", { id }, title), extra), ...children);
}

/** Figures as a list of [name, value, note]. */
export function figures(...entries) {
  return h("dl", { class: "figures" }, entries.map(([name, value, note]) => h("div", {},
    h("dt", {}, name), h("dd", {}, value), note ? h("dd", { class: "note" }, note) : null)));
}

const FOCUSABLE = "a[href], button, input, select, textarea, summary, [tabindex]";

/**
 * Put nodes into a container; those that have not changed stay, and what has the focus keeps it. What stays keeps its first
 * listeners: these ask for what they use, where the node does not show it.
 */
export function put(container, ...nodes) {
  const wanted = nodes.flat(Infinity).filter((node) => node !== null && node !== undefined && node !== false);
  wanted.forEach((node, index) => {
    const fresh = node instanceof Node ? node : document.createTextNode(String(node));
    const old = container.childNodes[index];
    if (!old) container.append(fresh);
    else if (!old.isEqualNode(fresh)) replace(old, fresh);
  });
  while (container.childNodes.length > wanted.length) container.lastChild.remove();
}

function replace(old, fresh) {
  const focused = old.contains(document.activeElement) ? [...focusables(old)].indexOf(document.activeElement) : -1;
  const [left, top] = old instanceof Element ? [old.scrollLeft, old.scrollTop] : [0, 0];
  old.replaceWith(fresh);
  if (focused >= 0) [...focusables(fresh)][focused]?.focus({ preventScroll: true });
  if (left || top) [fresh.scrollLeft, fresh.scrollTop] = [left, top];
}

function* focusables(root) {
  if (root.matches?.(FOCUSABLE)) yield root;
  if (root.querySelectorAll) yield* root.querySelectorAll(FOCUSABLE);
}

/**
 * A table with `fill(rows)`. A column is {title, kind?: "num"|"wide"|"nowrap", head?: true for the row's name};
 * a row is its cells, or {cells, chosen?, tone?}.
 */
export function table(label, columns, { tall = false, empty = "None." } = {}) {
  const body = h("tbody");
  const none = h("p", { class: "empty", hidden: true }, empty);
  const heads = columns.map((column) => h("th", { scope: "col", class: column.kind === "num" ? "num" : null },
    column.title || h("span", { class: "sr" }, column.label ?? "Actions")));
  const stacks = columns.some((column) => column.kind === "wide"); // on a phone: each row over several lines
  const made = h("table", { class: stacks ? "stacks" : null }, h("caption", { class: "sr" }, label), h("thead", {}, h("tr", {}, heads)), body);
  // What can scroll must be reachable by keyboard.
  const region = h("div", { hidden: true, class: `scroll${tall ? ` tall ${tall}` : ""}`, tabindex: "0", role: "group", "aria-label": label }, made);
  const fill = (rows) => {
    none.hidden = rows.length > 0;
    region.hidden = rows.length === 0;
    put(body, rows.map((row) => tableRow(columns, Array.isArray(row) ? { cells: row } : row)));
  };
  return { element: h("div", {}, region, none), fill, body };
}

function tableRow(columns, { cells, chosen, tone: rowTone }) {
  return h("tr", { class: chosen ? "chosen" : rowTone ? `row-${rowTone}` : null }, cells.map((cell, index) => {
    const { kind, head, title } = columns[index];
    const content = cell === null || cell === undefined || cell === "" || cell.length === 0 ? "–" : cell;
    return h(head ? "th" : "td", { scope: head ? "row" : null, class: kind ?? null, "data-none": content === "–", "data-label": head ? null : title || null }, kind === "wide" ? h("div", { class: "clamp" }, content) : content);
  }));
}

// On a phone long texts are cut after a few lines; a touch shows the rest.
document.addEventListener("click", (event) => { event.target.closest?.(".clamp")?.classList.toggle("open"); });
