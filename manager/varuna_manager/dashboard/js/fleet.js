// The page of the fleet: how many VMs there are in which state, how they came and went, which are quarantined, and all of them.
import { get } from "./api.js";
import { drainButton, resize } from "./actions.js";
import { chart, colour, thinned } from "./charts.js";
import { ago, card, figures, h, jobsOf, put, state, table, vmLink, when } from "./dom.js";
import { bytes, clock, count, countOf, money } from "./format.js";
import { requests } from "./panels.js";
import { atMostEvery } from "./turns.js";

const PAGE = 100;
const SLOW_MS = 10_000;
const HISTORIES = [["1 h", 3600], ["6 h", 6 * 3600], ["24 h", 86400], ["7 d", 7 * 86400]];
const STATES = ["requested", "ready", "suspect", "draining", "lost", "gone"];

export function fleetPage({ root, signal, may, title }) {
  title("Fleet");
  const numbers = h("div");
  const past = history(signal);
  const quarantines = quarantined();
  const vms = vmTable(signal, may, () => refreshFleet());
  const tiles = h("div", {}, numbers);
  root.append(h("div", { class: "head" }, h("h1", {}, "Fleet"), h("span", { class: "grow" }),
    may("admin") ? h("button", { type: "button", on: { click: () => resize(refresh) } }, "Number of VMs…") : null),
  tiles, past.element, quarantines.element, vms.element);

  /** The tiles, the chips and the rows are of one moment: that of one answer. */
  function drawOverview({ summary, fleet, quarantined: slow, vms: page, next_cursor: next }) {
    put(numbers, figures(
      ["VMs", count(summary.total), `${count(fleet.target)} wanted from ${fleet.provider}`], ["Ready", count(summary.by_state.ready ?? 0), countOf(summary.gpus, "GPU")],
      ["GPUs at work", count(summary.gpus_busy), countOf(summary.workers, "worker")], ["Notices", count(summary.noticed), "will be taken"],
      ["Quarantined", count(summary.quarantined), `${count(summary.slow)} slow`],
      ["Cost per hour", money(summary.cost_per_hour), summary.cost_per_hour === null ? "no price known" : "now"]));
    quarantines.draw(slow);
    vms.draw(summary, page, next);
  }
  const refreshFleet = requests([tiles, quarantines.element, vms.element], async () => drawOverview(await get(`fleet/overview?${vms.query()}`, signal)), signal);
  const refreshPast = requests(past.element, past.refresh, signal);
  past.onChange(refreshPast);
  vms.onChange(refreshFleet);
  const refresh = () => Promise.all([refreshFleet(), refreshPast()]);
  const soon = atMostEvery(1500, refresh);
  const slow = setInterval(() => { if (!document.hidden) soon(); }, SLOW_MS);
  signal.addEventListener("abort", () => { soon.stop(); clearInterval(slow); });
  refresh();
  return { refresh, onEvent: (event) => { if (event.vm_id || event.kind.startsWith("fleet")) soon(); } };
}

/** VMs over time, with marks where some were lost, were given notice, or were quarantined. */
function history(signal) {
  const drawn = chart("VMs over time", [{ title: "Until", kind: "nowrap" }, { title: "There", kind: "num" }, { title: "Became ready", kind: "num" }, { title: "Lost or gone", kind: "num" },
    { title: "Notices", kind: "num" }, { title: "Quarantined", kind: "num" }], { height: 300, signal });
  const span = h("select", { "aria-label": "How far back", on: { change: () => changed() } },
    HISTORIES.map(([text, seconds]) => h("option", { value: seconds }, `last ${text}`)));
  let changed = null;
  async function refresh() {
    const since = new Date(Date.now() - 1000 * span.value).toISOString();
    drawn.draw(historyContent(await get(`fleet/history?since=${encodeURIComponent(since)}&points=180`, signal)));
  }
  const legend = h("span", { class: "note" }, [["c-lost", "lost or gone"], ["c-notice", "given notice (striped)"], ["c-quarantine", "quarantined (crossed)"]]
    .map(([tone, word]) => h("span", { class: "key" }, h("span", { class: `swatch ${tone}`, "aria-hidden": "true" }), word)));
  return { element: card("VMs over time", [legend, h("span", { class: "grow" }), span], drawn.element), refresh, onChange: (call) => { changed = call; } };
}

function historyContent(found) {
  const x = found.at_unix_s.map((at) => new Date(1000 * at));
  const most = (...columns) => Math.max(...found.at_unix_s.map((_, index) => columns.reduce((sum, column) => sum + found[column][index], 0)));
  const whole = (highest, ticks) => ({ rangemode: "tozero", tickformat: ",d", ...(highest <= ticks ? { dtick: 1 } : { nticks: ticks }) });
  const total = (column) => count(found[column].reduce((sum, value) => sum + value, 0));
  const bars = (column, word, color, shape) => ({
    x, y: found[column].map((value) => value || null), name: word, type: "bar", yaxis: "y2", width: 800 * found.bucket_s,
    marker: { color: colour(color), pattern: { shape, fillmode: "overlay", fgcolor: colour("card"), fgopacity: 0.6, size: 5, solidity: 0.35 } }, hovertemplate: `%{y} ${word}<extra></extra>` });
  return {
    words: found.present.length ? `${countOf(found.present.at(-1), "VM")} now; in this time ${total("ready")} became ready, ${total("lost")} lost or given back, ${total("notices")} given notice, ${total("quarantines")} quarantined.` : "No history yet.",
    rows: () => thinned(x.length, 90).reverse().map((index) => [clock(x[index]), count(found.present[index]), found.ready[index], found.lost[index], found.notices[index], found.quarantines[index]]),
    traces: () => [
      { x, y: found.present, name: "VMs", type: "scatter", mode: "lines", line: { color: colour("op-f"), width: 1.8, shape: "hv" }, fill: "tozeroy", fillcolor: `${colour("op-f")}1c`, hovertemplate: "%{y} VMs<extra></extra>" },
      bars("lost", "lost or gone", "mark", ""), bars("notices", "given notice", "op-r", "/"), bars("quarantines", "quarantined", "op-a", "x")],
    layout: () => ({ barmode: "stack", xaxis: { type: "date", anchor: "y2" }, yaxis: { domain: [0.42, 1], title: { text: "VMs" }, ...whole(most("present"), 5) },
      yaxis2: { domain: [0, 0.32], title: { text: "marks" }, ...whole(most("lost", "notices", "quarantines"), 3) } }),
  };
}

function quarantined() {
  const list = table("Quarantined VMs", [{ title: "VM", head: true, kind: "nowrap" }, { title: "Slower by", kind: "num" }, { title: "Until", kind: "nowrap" }, { title: "Times", kind: "num" }, { title: "Why", kind: "wide" }],
    { tall: "low", empty: "No VM is quarantined." });
  return {
    element: card("Quarantines", [], list.element),
    draw: (vms) => list.fill(vms.map((vm) => [vmLink(vm.id), vm.slow_ratio ? `${vm.slow_ratio.toFixed(2)}×` : "–", when(vm.quarantined_until), vm.quarantines, vm.slow_reason ?? vm.reason])),
  };
}

/** What to know of a VM beside its state. */
export function troubles(vm) {
  return [
    vm.notice_deadline ? state("notice given") : null, vm.cordoned_at ? state("cordoned") : null, vm.quarantined_until ? state("quarantined") : null,
    vm.slow_ratio && !vm.quarantined_until ? state("slow", `slow, ${vm.slow_ratio.toFixed(2)}×`) : null];
}

function vmTable(signal, may, changed) {
  const list = table("VMs", [{ title: "VM", head: true, kind: "nowrap" }, { title: "State", kind: "nowrap" }, { title: "GPUs", kind: "num" }, { title: "Memory each", kind: "num" }, { title: "Host", kind: "nowrap" },
    { title: "Job", kind: "nowrap" }, { title: "Heard", kind: "nowrap" }, { title: "Reason", kind: "wide" }, { title: "" }], { tall: "high", empty: "No such VMs." });
  const chips = h("div", { class: "chips", role: "group", "aria-label": "VMs by state" });
  const search = h("input", { type: "search", placeholder: "Id or host contains…", "aria-label": "Id or host contains", on: { input: () => soon() } });
  const where = h("span", { class: "note", role: "status" });
  const back = h("button", { type: "button", on: { click: () => { pages.pop(); load(); } } }, "Previous");
  const on = h("button", { type: "button", on: { click: () => { pages.push(next); load(); } } }, "Next");
  let wanted = null; // the state
  let pages = [null]; // their cursors; null: the first
  let next = null;
  let load = null; // asks for all of the page

  function draw(summary, rows, following) {
    next = following;
    const counts = { ...summary.by_state, gone: summary.gone };
    put(chips, STATES.filter((one) => counts[one] || one === wanted).map((one) => h("button", { type: "button", "aria-pressed": String(wanted === one), on: { click: () => {
      wanted = wanted === one ? null : one;
      first();
    } } }, state(one), h("span", { class: "count" }, count(counts[one] ?? 0)))));
    list.fill(rows.map((vm) => [
      vmLink(vm.id), [state(vm.state), " ", troubles(vm)], vm.gpus, bytes(vm.device_memory_bytes), vm.host,
      jobsOf(vm.workers), heard(vm), vm.reason, drainButton(vm, () => vm, may, changed) ?? " "])); // a row shows its jobs: it is a new one when they change
    const begin = (pages.length - 1) * PAGE;
    put(where, rows.length ? `${count(begin + 1)}–${count(begin + rows.length)}` : "");
    back.disabled = pages.length === 1;
    on.disabled = next === null;
  }
  function first() { pages = [null]; return load(); }
  const query = () => new URLSearchParams({ limit: PAGE, gone: String(wanted === "gone"), ...(wanted ? { state: wanted } : {}),
    ...(search.value ? { q: search.value } : {}), ...(pages.at(-1) ? { cursor: pages.at(-1) } : {}) });
  const soon = atMostEvery(300, first);
  signal.addEventListener("abort", soon.stop);
  return {
    element: card("VMs", [chips, h("span", { class: "grow" }), h("div", { class: "controls" }, search, where, back, on)], list.element),
    draw, query, onChange: (call) => { load = call; },
  };
}

/** Coarse while all is well. */
export function heard(vm) {
  if (vm.last_heard_s === null || vm.last_heard_s === undefined) return "–";
  return vm.last_heard_s < 5 ? "just now" : ago(new Date(Date.now() - 1000 * vm.last_heard_s));
}
