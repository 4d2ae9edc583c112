// Events, newest first: a list that pages share, and the page of all.
import { get } from "./api.js";
import { card, h, jobLink, put, symbol, table, vmLink, when } from "./dom.js";
import { requests } from "./panels.js";
import { severity } from "./severity.js";
import { atMostEvery } from "./turns.js";

const PAGE = 60;
const MOST = 600;
const ROUTINE = ["checkpoint", "decision"]; // kinds that say little

/** A card of the events that `about` (query fields) asks for; new ones come by `add`. `whole`: as high as its rows. */
export function eventList({ about = {}, signal, ofJob = false, head = "Events", whole = false }) {
  let shown = [];
  let fresh = []; // came while the list was being asked for
  let loaded = false;
  let kind = "";
  let text = "";
  let older = false;
  let before = null; // the event below which more are asked for
  const columns = [{ title: "Time", kind: "nowrap" }, { title: "Kind", kind: "nowrap" },
    ...(ofJob ? [{ title: "Gen.", kind: "num" }] : [{ title: "Job", kind: "nowrap" }]), { title: "VM", kind: "nowrap" }, { title: "What and why", kind: "wide" }];
  const list = table(head, columns, { tall: whole ? false : "high", empty: "No events match." });
  const more = h("button", { type: "button", on: { click: () => load(shown.at(-1)?.id ?? null) } }, "Older");
  const kinds = h("select", { "aria-label": "Kind of event", on: { change: () => { kind = kinds.value; load(); } } });
  const search = h("input", { type: "search", placeholder: "Text contains…", "aria-label": "Text contains", on: { input: () => searchSoon() } });
  const routine = h("input", { type: "checkbox", id: `routine-${head}`, on: { change: draw } });

  const query = (fields) => new URLSearchParams({ ...about, ...(kind ? { kind } : {}), ...(text ? { q: text } : {}), ...fields });
  async function ask() {
    loaded = false;
    const from = before;
    const found = await get(`events?${query({ order: "desc", limit: PAGE, ...(from ? { before: from } : {}) })}`, signal);
    shown = from ? [...shown, ...found] : found;
    before = null;
    older = found.length === PAGE;
    loaded = true;
    for (const event of fresh.splice(0)) insert(event);
    draw();
  }
  /** At its place: after a break the stream brings what came meanwhile, also what is on the list or below its last row. */
  function insert(event) {
    if (kind && event.kind !== kind) return;
    if (text && !event.message.toLowerCase().includes(text.toLowerCase())) return;
    const place = shown.findIndex((one) => one.id <= event.id);
    if (place < 0 && older) return; // "Older" asks for it
    if (shown[place]?.id !== event.id) shown.splice(place < 0 ? shown.length : place, 0, event);
    if (shown.length > MOST) { shown.length = MOST; older = true; }
  }
  function draw() {
    const visible = shown.filter((event) => kind || text || routine.checked || !ROUTINE.includes(event.kind));
    list.fill(visible.map((event) => {
      const level = severity(event);
      return { tone: level, cells: [
        when(event.at), [mark(level), event.kind.replaceAll("_", " ")],
        ofJob ? event.generation : event.job_id ? jobLink(event.job_id, event.job_name ?? event.job_id) : "–",
        event.vm_id ? vmLink(event.vm_id) : "–", event.message,
      ] };
    }));
    more.hidden = !older;
  }
  const soon = atMostEvery(400, draw);
  const searchSoon = atMostEvery(300, () => { text = search.value.trim(); return load(); });
  signal.addEventListener("abort", () => { soon.stop(); searchSoon.stop(); });

  const known = new Set();
  function offer(names) {
    names.forEach((one) => known.add(one));
    put(kinds, h("option", { value: "" }, "all kinds"), [...known].sort().map((one) => h("option", { value: one }, one.replaceAll("_", " "))));
    kinds.value = kind;
  }
  offer([]);
  get("events/kinds", signal).then(offer).catch(() => {}); // without them new ones are still offered as they come
  const tools = h("div", { class: "controls" }, search, kinds, h("span", {}, routine, " ", h("label", { for: routine.id }, "routine ones too")));
  const element = card(head, [h("span", { class: "grow" }), tools], list.element, h("div", { class: "controls" }, more));
  const refresh = requests(element, ask, signal);
  function load(from = null) { before = from; return refresh(); }
  load();
  return {
    element,
    add(event) {
      if (!known.has(event.kind)) offer([event.kind]);
      if (!loaded) { fresh.push(event); return; }
      insert(event);
      soon();
    },
    reload: () => load(),
  };
}

/** A sign beside the colour; events that only inform have none. */
function mark(level) {
  const [sign, word] = { bad: [symbol("failed"), "failure: "], warn: ["!", "warning: "], good: [symbol("succeeded"), ""] }[level] ?? ["", ""];
  return sign ? [h("span", { class: `level ${level}`, "aria-hidden": "true" }, `${sign} `), word ? h("span", { class: "sr" }, word) : null] : [];
}

export function eventsPage({ root, signal, title }) {
  title("Events");
  const list = eventList({ signal, head: "All events", whole: true });
  root.append(h("div", { class: "head" }, h("h1", {}, "Events")), list.element);
  return { onEvent: list.add, refresh: list.reload };
}
