// The P×D grid: stages from left to right, a row for each replica; where each rank is and how it does.
import { card, h, put, state, symbol, tone, vmLink } from "./dom.js";
import { bytes, count, seconds, shape } from "./format.js";

const MOST_WORDY = 96; // more ranks than these are shown by symbol and VM only

export function grid() {
  const note = h("span", { class: "note" });
  const body = h("div");
  const region = h("div", { class: "scroll tall", tabindex: "0", role: "group", "aria-label": "Ranks by stage and replica" }, body);
  return {
    element: card("Placement", note, region),
    draw(generation, vms) {
      if (!generation) { put(body, h("p", { class: "empty" }, "Not placed yet.")); return; }
      put(note, `generation ${generation.number} (${generation.state}): ${shape(generation.p, generation.d)}, `
        + `${many(generation.p, "pipeline stage")} × ${many(generation.d, "replica")}`);
      const places = new Map(generation.placement.map((place) => [place.rank, place]));
      const workers = new Map(generation.workers.map((worker) => [worker.rank, worker]));
      const byId = new Map(vms.map((vm) => [vm.id, vm]));
      const wordy = generation.p * generation.d <= MOST_WORDY;
      const starts = generation.plan.stage_starts;
      const stages = Array.from({ length: generation.p }, (_, stage) => h("th", { scope: "col" }, `stage ${stage}`,
        h("br"), sections(starts[stage], starts[stage + 1])));
      const rows = Array.from({ length: generation.d }, (_, replica) => h("tr", {}, h("th", { scope: "row" }, `replica ${replica}`),
        Array.from({ length: generation.p }, (__, stage) => {
          const rank = replica * generation.p + stage;
          const place = places.get(rank);
          return cell(rank, place, workers.get(rank), byId.get(place?.vm_id), wordy);
        })));
      put(body, h("table", { class: "grid" }, h("caption", { class: "sr" }, "Ranks by stage and replica"),
        h("thead", {}, h("tr", {}, h("td", {}), stages)), h("tbody", {}, rows)));
    },
  };
}

const many = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;

/** Those of a stage: from its first one to before that of the next. */
function sections(first, next) {
  if (first === undefined) return "all sections"; // it calibrates
  if (next === undefined) return `section ${first} to the last`;
  return next - first === 1 ? `section ${first}` : `sections ${first}–${next - 1}`;
}

/** The worst of what is known: the VM's trouble, else the worker's state. */
function healthOf(worker, vm) {
  if (vm?.notice_deadline) return "notice given";
  if (vm && vm.state !== "ready") return vm.state;
  if (vm?.cordoned_at) return "cordoned";
  if (vm?.quarantined_until) return "quarantined";
  if (vm?.slow_ratio) return "slow";
  return worker?.state ?? "assigned";
}

function cell(rank, place, worker, vm, wordy) {
  const health = healthOf(worker, vm);
  const name = place ? vmLink(place.vm_id) : "–";
  if (!wordy) {
    return h("td", { class: tone(health) }, h("span", { class: "line" }, name, h("span", { "aria-hidden": "true" }, symbol(health)), h("span", { class: "sr" }, health)));
  }
  const busy = worker?.forward_us ? `F ${seconds(worker.forward_us / 1e6)} · B ${seconds((worker.backward_us ?? 0) / 1e6)}` : null;
  const memory = worker?.memory_bytes ? ` · ${bytes(worker.memory_bytes)}` : "";
  return h("td", { class: tone(health) },
    h("div", { class: "line" }, name, state(health)),
    h("div", { class: "line note" }, h("span", {}, `rank ${rank}`), worker?.step ? h("span", {}, `step ${count(worker.step)}`) : null),
    busy ? h("div", { class: "note" }, busy + memory) : null,
    vm?.slow_ratio ? h("div", { class: "note" }, `${vm.slow_ratio.toFixed(2)}× its peers' time`) : null);
}
