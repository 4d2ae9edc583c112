// The tables of a job's page: plans, lost time, checkpoints, cost, generations.
import { getPage } from "./api.js";
import { ago, card, h, put, state, table, vmLink, when } from "./dom.js";
import { age, bytes, count, countOf, loss, money, number, percent, seconds, shape, signedPercent } from "./format.js";

const CAUSES = {
  training: "training", bubbles: "pipeline bubbles", data: "between steps: data", evaluation: "between steps: evaluation", checkpoints: "checkpoints",
  script: "between steps: other", redone_steps: "steps done again", morphs: "morphs",
  waiting_for_vms: "waiting for VMs", calibration: "calibration",
};

/** Predicted against actual step time of each plan; and what else the planner considered for the newest. */
export function plans() {
  const note = h("p", { class: "reason" });
  const actual = table("Predicted and actual step time by generation", [{ title: "Gen.", kind: "num" }, { title: "P×D", kind: "nowrap" }, { title: "m", kind: "num" },
    { title: "Predicted", kind: "num" }, { title: "Actual", kind: "num" }, { title: "Between", kind: "num" }, { title: "Off by", kind: "num" }, { title: "Examples/s", kind: "num" }, { title: "Steps", kind: "num" }], { tall: true, empty: "No plan yet." });
  const candidates = table("What the planner considered for the newest plan", [{ title: "P×D", kind: "nowrap" }, { title: "m", kind: "num" }, { title: "Step time", kind: "num" },
    { title: "Verdict", kind: "nowrap" }, { title: "Why", kind: "wide" }], { tall: true, empty: "Nothing else was considered: the shape is pinned, or only one is possible." });
  const none = h("p", { class: "empty" }, "No plan yet.");
  return {
    element: h("div", { class: "columns" }, card("Predicted against actual", [], actual.element), card("Plan candidates", [], note, none, candidates.element)),
    draw(list, newest) {
      [none.hidden, candidates.element.hidden] = [newest !== null, newest === null];
      actual.fill(list.map((one) => [one.generation, shape(one.plan.p, one.plan.d), one.plan.micro_batch, seconds(one.predicted_step_s), seconds(one.actual_step_s), seconds(one.between_s),
        signedPercent(one.error), number(one.actual_examples_per_s), count(one.steps)]));
      put(note, newest ? `Generation ${newest.generation}: ${newest.reason}` : "");
      const won = (one) => one.p === newest.plan.p && one.d === newest.plan.d && one.micro_batch === newest.plan.micro_batch;
      candidates.fill((newest?.candidates ?? []).map((one) => ({
        chosen: won(one),
        cells: [shape(one.p, one.d), one.micro_batch, seconds(one.predicted_minibatch_s), state(won(one) ? "chosen" : one.fits ? "predicted slower" : "too large", won(one) ? "chosen" : one.fits ? "fits, lost" : "too large"), one.reason],
      })));
    },
  };
}

export function timeLost() {
  const note = h("span", { class: "note" });
  const bar = h("div", { class: "bar", "aria-hidden": "true" });
  const causes = table("Time by cause", [{ title: "Spent on", head: true, kind: "nowrap" }, { title: "Time", kind: "num" }, { title: "Share", kind: "num" }, { title: "", label: "Details", kind: "wide" }]);
  return {
    element: card("Where the time went", note, bar, causes.element),
    draw(time) {
      put(note, `goodput ${percent(time.goodput, 1)}: the part of the ${seconds(time.elapsed_s)} since the first start that passed in steps that count`);
      put(bar, time.causes.filter((one) => one.share > 0).map((one) => {
        const part = h("div", { class: `bar-fill c-${one.cause}` });
        part.style.width = `${100 * one.share}%`;
        return part;
      }));
      causes.fill(time.causes.map((one) => [[h("span", { class: `swatch c-${one.cause}`, "aria-hidden": "true" }), CAUSES[one.cause] ?? one.cause],
        seconds(one.seconds), percent(one.share, 1), one.text]));
    },
  };
}

export function cost() {
  const head = h("p", { class: "note" });
  const vms = table("Cost by VM, most expensive first", [{ title: "VM", kind: "nowrap" }, { title: "Hours", kind: "num" }, { title: "GPU-hours", kind: "num" }, { title: "Price per hour", kind: "num" }, { title: "Cost", kind: "num" }], { tall: true, empty: "No VM has run this job yet." });
  return {
    element: card("Cost", [], head, vms.element),
    draw(found) {
      const unpriced = found.vms_without_price ? `; ${countOf(found.vms_without_price, "VM")} without a known price` : "";
      put(head, `${number(found.gpu_hours)} GPU-hours, ${number(found.vm_hours)} VM-hours`,
        found.cost === null ? "; the provider gives no price." : `; ${money(found.cost)} in all, ${money(found.cost_per_hour)} per hour now${unpriced}.`);
      vms.fill(found.by_vm.map((one) => [vmLink(one.vm_id), number(one.hours), number(one.gpu_hours), money(one.price_per_hour), money(one.cost)]));
    },
  };
}

export function checkpoints(job, signal) {
  const note = h("span", { class: "note" });
  const list = table("Checkpoints, newest first", [{ title: "Step", kind: "num" }, { title: "Gen.", kind: "num" }, { title: "Age", kind: "nowrap" }, { title: "Size", kind: "num" }, { title: "Where", kind: "wide" }],
    { tall: true, empty: "No checkpoint yet." });
  const more = h("button", { type: "button", hidden: true, on: { click: () => addOlder() } }, "Older");
  const byKey = new Map();
  let shown = []; // newest first
  let older = null; // the address of the page below them

  /** Ask for the newest page, and for what lies between it and those that are shown. */
  async function refresh() {
    const known = shown[0];
    let page = await getPage(`jobs/${encodeURIComponent(job)}/checkpoints?order=desc&limit=25`, signal);
    const found = [...page.items];
    while (known && page.next && newestFirst(found.at(-1), known) < 0) {
      page = await getPage(page.next, signal);
      found.push(...page.items);
    }
    if (!known) older = page.next;
    add(found);
  }
  async function addOlder() {
    const page = await getPage(older, signal);
    older = page.next;
    add(page.items);
  }
  function add(found) {
    found.forEach((one) => byKey.set(`${one.generation}/${one.step}`, one));
    shown = [...byKey.values()].sort(newestFirst);
    draw();
  }
  function draw() {
    put(note, shown.length ? `newest ${age(shown[0].at)}, at step ${count(shown[0].step)}` : "");
    list.fill(shown.map((one) => [count(one.step), one.generation, ago(one.at), bytes(one.total_bytes), h("code", {}, one.url)]));
    more.hidden = older === null;
  }
  return { element: card("Checkpoints", note, list.element, more), refresh };
}

/** The order in which the manager lists checkpoints. */
const newestFirst = (one, other) => other.generation - one.generation || other.step - one.step;

export function generationsTable() {
  const list = table("Generations, newest first", [{ title: "Gen.", kind: "num" }, { title: "Kind", kind: "nowrap" }, { title: "State", kind: "nowrap" }, { title: "P×D", kind: "nowrap" }, { title: "Began", kind: "nowrap" },
    { title: "Steps", kind: "num" }, { title: "Last loss", kind: "num" }, { title: "Without progress", kind: "num" }, { title: "Done again", kind: "num" }, { title: "Why it began", kind: "wide" }, { title: "Why it ended", kind: "wide" }], { tall: true });
  const note = h("span", { class: "note" });
  return {
    element: card("Generations", note, list.element),
    draw(generations) {
      const training = generations.filter((one) => one.kind === "training").length;
      put(note, countOf(Math.max(0, training - 1), "morph"));
      list.fill(generations.slice(-200).reverse().map((one) => [one.number, one.kind, state(one.state), shape(one.p, one.d), when(one.created_at),
        one.resumed_step === null || one.last_step === null ? "–" : `${count(one.resumed_step + 1)}–${count(one.last_step)}`, loss(one.last_loss),
        downtime(one), one.steps_redone, one.reason + morph(one) + copies(one), one.end_reason ?? (one.stop_cause ? `stopping: ${one.stop_cause.replaceAll("_", " ")}` : "–")]));
    },
  };
}

/** Whether its workers go on in place or are new, what is run again, and where their state comes from. */
function morph(one) {
  const { kept, peers, store } = one.state_from ?? {};
  const parts = [one.kind_of_morph === "reshape" ? "in place" : one.kind_of_morph, redone(one), kept && `${bytes(kept)} kept in memory`,
    peers && `${bytes(peers)} from memory`, store && `${bytes(store)} from a checkpoint`].filter(Boolean);
  return parts.length ? ` (${parts.join(", ")})` : "";
}

/** Whether other VMs keep copies of its stages, and the step of these. */
function copies(one) {
  if (!one.keepers.length) return "";
  if (one.copies_obstacle) return `; no copies of its stages are kept: ${one.copies_obstacle}`;
  return one.copied_step === null ? "; no copy of its stages is whole yet" : `; copies of its stages are whole at step ${count(one.copied_step)}`;
}

function redone(one) {
  const { global_batch, micro_batch } = one.plan;
  return one.micro_batches_redone !== null && `${one.micro_batches_redone} of ${Math.ceil(global_batch / micro_batch)} micro-batches run again`;
}

/** Seconds without progress before its first step, and what they went to. */
function downtime(one) {
  const parts = (one.downtime ?? []).map((part) => `${part.name.replaceAll("_", " ")} ${seconds(part.seconds)}`).join(", ");
  return h("span", { title: parts || null }, seconds(one.seconds_without_progress));
}
