// Events, newest first: a list that pages share, and the page of all.
import { get } from "./api.js";
import { atMostEvery, card, h, jobLink, put, table, vmLink } from "./dom.js";
import { clock } from "./format.js";

const PAGE = 60;
const MOST = 600;
const ROUTINE = ["checkpoint", "decision"]; // kinds that say little

/** A card of the events that `about` (query fields) asks for; new ones come by `add`. */
export function eventList({ about = {}, signal, ofJob = false, head = "Events" }) {
  let shown = [];
  let fresh = []; // came while the list was being asked for
  let loaded = false;
  let kind = "";
  let older = false;
  const columns = [{ title: "Time", kind: "nowrap" }, { title: "Kind", kind: "nowrap" },
    ...(ofJob ? [{ title: "Gen.", kind: "num" }] : [{ title: "Job", kind: "nowrap" }]), { title: "VM", kind: "nowrap" }, { title: "What and why", kind: "wide" }];
  const list = table(head, columns, { tall: true, empty: "No events." });
  const more = h("button", { type: "button", on: { click: () => load(shown.at(-1)?.id) } }, "Older");
  const kinds = h("select", { "aria-label": "Kind of event", on: { change: () => { kind = kinds.value; load(); } } });
  const routine = h("input", { type: "checkbox", id: `routine-${head}`, on: { change: draw } });
  const note = h("span", { class: "note" });

  const query = (fields) => new URLSearchParams({ ...about, ...(kind ? { kind } : {}), ...fields });
  async function load(before = null) {
    loaded = false;
    const fields = { order: "desc", limit: PAGE, ...(before ? { before } : {}) };
    try {
      const found = await get(`events?${query(fields)}`, signal);
      shown = before ? [...shown, ...found] : found;
      older = found.length === PAGE;
      loaded = true;
      for (const event of fresh.splice(0)) insert(event);
      draw();
    } catch (error) {
      if (!signal.aborted) put(note, error.message);
    }
  }
  function insert(event) {
    if (kind && event.kind !== kind) return;
    if (!shown.some((one) => one.id === event.id)) shown.unshift(event);
    if (shown.length > MOST) { shown.length = MOST; older = true; }
  }
  function draw() {
    const visible = shown.filter((event) => kind || routine.checked || !ROUTINE.includes(event.kind));
    list.fill(visible.map((event) => [
      clock(event.at), event.kind.replaceAll("_", " "),
      ofJob ? event.generation : event.job_id ? jobLink(event.job_id, event.job_id) : "–",
      event.vm_id ? vmLink(event.vm_id) : "–", event.message,
    ]));
    more.hidden = !older;
  }
  const soon = atMostEvery(400, draw);
  signal.addEventListener("abort", soon.stop);

  const known = new Set();
  function offer(more) {
    more.forEach((one) => known.add(one));
    put(kinds, h("option", { value: "" }, "all kinds"), [...known].sort().map((one) => h("option", { value: one }, one.replaceAll("_", " "))));
    kinds.value = kind;
  }
  get("events/kinds", signal).then(offer).catch(() => {});
  load();
  const tools = h("div", { class: "controls" }, kinds, routine, h("label", { for: routine.id }, "routine ones too"), note);
  return {
    element: card(head, [h("span", { class: "grow" }), tools], list.element, h("div", { class: "controls" }, more)),
    add(event) {
      if (!known.has(event.kind)) offer([event.kind]);
      if (!loaded) { fresh.push(event); return; }
      insert(event);
      soon();
    },
    reload: () => load(),
  };
}

export function eventsPage({ root, signal, title }) {
  title("Events");
  const list = eventList({ signal, head: "All events" });
  root.append(h("div", { class: "head" }, h("h1", {}, "Events")), list.element);
  return { onEvent: list.add, refresh: list.reload };
}
