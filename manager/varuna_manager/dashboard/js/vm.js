// The page of one VM.
import { get } from "./api.js";
import { cordonButton, drainButton } from "./actions.js";
import { ago, card, figures, h, jobLink, link, put, state, table, when } from "./dom.js";
import { eventList } from "./events.js";
import { heard, troubles } from "./fleet.js";
import { bytes, count, money, seconds } from "./format.js";
import { requests } from "./panels.js";
import { atMostEvery } from "./turns.js";
import { usage } from "./usage.js";

const USAGE_MS = 15_000;

export function vmPage({ root, signal, may, argument, title }) {
  title(argument);
  const head = h("div", { class: "head" });
  const summary = h("div");
  const workers = table("Workers", [{ title: "Job", head: true, kind: "nowrap" }, { title: "Gen.", kind: "num" }, { title: "Rank", kind: "num" }, { title: "Device", kind: "num" }, { title: "State", kind: "nowrap" }, { title: "Step", kind: "num" },
    { title: "Forward", kind: "num" }, { title: "Backward", kind: "num" }, { title: "Waiting per step", kind: "num" }, { title: "Memory", kind: "num" }], { empty: "No worker runs there." });
  const past = table("History", [{ title: "Time", kind: "nowrap" }, { title: "State", kind: "nowrap" }, { title: "Why", kind: "wide" }], { tall: true });
  const events = eventList({ about: { vm: argument }, signal, head: "Events of this VM" });
  const top = h("div", { class: "page" }, head, summary);
  const tables = [card("Workers", [], workers.element), card("History", [], past.element)];
  const busy = usage(argument, signal);
  root.append(top, tables[0], busy.element, tables[1], events.element);
  const refreshUsage = requests(busy.element, busy.refresh, signal);

  let vm = null; // as of the newest answer
  const us = (value) => seconds(value === null ? null : value / 1e6);
  const refresh = requests([top, ...tables], async () => {
    vm = await get(`vms/${encodeURIComponent(argument)}`, signal);
    put(head, h("h1", {}, vm.id), state(vm.state), ...troubles(vm).filter(Boolean), h("span", { class: "crumb" }, link("#/fleet", "fleet")),
      h("span", { class: "grow" }), cordonButton(vm, may, refresh), drainButton(vm, () => vm, may, refresh));
    put(summary, figures(["GPUs", count(vm.gpus), `${bytes(vm.device_memory_bytes)} each`], ["Host", vm.host ?? "–", vm.provider], ["Heard", heard(vm)],
      ["There since", ago(vm.created_at), when(vm.created_at)], ["Price per hour", money(vm.price_per_hour)], ["Hangs", count(vm.hangs)], ["Quarantines", count(vm.quarantines), vm.quarantined_until ? ["until ", when(vm.quarantined_until)] : null]),
    vm.slow_reason || vm.reason ? h("p", { class: "reason" }, vm.slow_reason ?? vm.reason) : null);
    workers.fill(vm.workers.map((one) => [jobLink(one.job_id, one.job_name), one.generation, one.rank, one.local_rank, state(one.state), count(one.step),
      us(one.forward_us), us(one.backward_us), us(one.wait_us), bytes(one.memory_bytes)]));
    past.fill(vm.history.slice().reverse().map((one) => [when(one.at), state(one.state), one.reason]));
  }, signal);
  const soon = atMostEvery(1000, refresh);
  const timer = setInterval(() => { if (!document.hidden) soon(); }, 5000);
  signal.addEventListener("abort", () => { soon.stop(); clearInterval(timer); clearInterval(slow); });
  const slow = setInterval(() => { if (!document.hidden) refreshUsage(); }, USAGE_MS);
  refresh();
  refreshUsage();
  return { refresh: () => Promise.all([refresh(), refreshUsage()]), onEvent: (event) => { if (event.vm_id === argument) { events.add(event); soon(); } } };
}
