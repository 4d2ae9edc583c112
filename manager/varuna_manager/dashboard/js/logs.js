// The log of a rank over all generations, or of one: its end, followed by long polls; and what a search finds.
import { get, getBytes, sleep } from "./api.js";
import { card, h, put } from "./dom.js";
import { bytes, count } from "./format.js";
import { logLines } from "./log_lines.js";
import { atMostEvery } from "./turns.js";

const TAIL_BYTES = 64 * 1024;
const OLDER_TAIL_BYTES = 16 * 1024;
const MOST_OLDER = 20; // generations before the newest that are read
const MOST_LISTED = 500;
const WAIT_S = 20;
const NOT_YET = [404, 503]; // there is no log yet, or its VM does not answer now

export function logs(job, signal) {
  const rank = h("input", { type: "number", min: "0", step: "1", value: "0", id: "log-rank", size: "5" });
  const generation = h("select", { id: "log-generation" });
  const source = h("select", { id: "log-source" }, [["all", "all lines"], ["script", "the script's"], ["varuna", "Varuna's"]].map(([value, text]) => h("option", { value }, text)));
  const follows = h("input", { type: "checkbox", id: "log-follow", checked: true });
  const search = h("input", { type: "search", placeholder: "Search this log…", "aria-label": "Search this log" });
  const lines = logLines();
  const note = h("p", { class: "note", role: "status" }, "No logs yet.");
  const found = h("div");
  let reading = null; // the AbortController of the read under way
  let newest = null; // the job's generation, as the page knows it
  let looked = ""; // what the lines found have in them

  const isAll = () => generation.value === "all";
  const wanted = () => (isAll() ? newest : Number(generation.value));
  const about = (number, fields) => new URLSearchParams({ rank: rank.value || 0, generation: number, ...fields });
  const older = () => (isAll() ? Array.from({ length: Math.min(MOST_OLDER, newest - 1) }, (_, index) => newest - Math.min(MOST_OLDER, newest - 1) + index) : []);

  /** The ends of the older logs, then the newest one, followed. `goesOn`: the older ones are there. */
  async function read({ goesOn = false } = {}) {
    reading?.abort();
    const mine = new AbortController();
    reading = mine;
    const stop = AbortSignal.any([mine.signal, signal]);
    if (!goesOn) {
      lines.clear();
      for (const number of older()) {
        await readOnce(number, stop);
        if (stop.aborted) return;
      }
    }
    if (goesOn || older().length) lines.mark(`generation ${wanted()}`);
    look();
    await readOn(wanted(), stop);
  }

  async function readOnce(number, stop) {
    lines.mark(`generation ${number}`);
    try {
      const part = await getBytes(`jobs/${job.id}/logs?${about(number, { offset: -OLDER_TAIL_BYTES })}`, stop);
      if (part.offset > 0) lines.append(`(its last ${bytes(part.bytes.length)} of ${bytes(part.size)})\n`);
      lines.append(new TextDecoder().decode(part.bytes));
    } catch (error) {
      if (!stop.aborted) lines.append(`(not here: ${error.message})\n`);
    }
  }

  async function readOn(number, stop) {
    const decoder = new TextDecoder();
    let offset = -TAIL_BYTES;
    let isCut = false;
    let failures = 0;
    while (!stop.aborted) {
      try {
        const part = await getBytes(`jobs/${job.id}/logs?${about(number, { offset, wait_s: offset > 0 ? WAIT_S : 0 })}`, stop);
        failures = 0;
        if (offset < 0) isCut = part.offset > 0;
        offset = part.next;
        append(decoder.decode(part.bytes, { stream: true }));
        put(note, `generation ${part.generation}, rank ${rank.value}: ${bytes(part.size)}${isCut ? ", its end" : ""}`);
        if (!follows.checked) return;
        if (part.bytes.length === 0) await sleep(1000, stop);
      } catch (error) {
        if (stop.aborted) return;
        failures += 1;
        const pauseMs = Math.min(30_000, 1000 * 2 ** failures);
        put(note, h("span", { class: NOT_YET.includes(error.status) ? "" : "wrong" }, `${error.message}; trying again in ${pauseMs / 1000} s`));
        await sleep(pauseMs, stop);
        if (!follows.checked) return;
      }
    }
  }

  function append(text) {
    lines.append(text);
    if (looked && text.toLowerCase().includes(looked.toLowerCase())) lookAgain();
  }

  async function look() {
    const what = looked;
    if (!what) { put(found); return; }
    try {
      const numbers = [...older(), wanted()];
      const answers = await Promise.all(numbers.map((number) => get(`jobs/${job.id}/logs/search?${about(number, { q: what, limit: 200 })}`, signal)
        .catch((error) => { if (number === wanted()) throw error; return null; })));
      if (what !== looked) return;
      const some = answers.filter(Boolean);
      const matches = some.flatMap((answer) => answer.matches.map((match) => `${some.length > 1 ? `generation ${answer.generation}, ` : ""}${match.line_number}: ${match.text}\n`));
      put(found, h("p", { class: "note", role: "status" }, `${count(matches.length)} ${matches.length === 1 ? "line" : "lines"} with “${what}” in ${bytes(some.reduce((sum, one) => sum + one.searched_bytes, 0))} of `
        + `${some.length > 1 ? `${some.length} generations` : `generation ${some[0].generation}`}${some.every((one) => one.complete) ? "" : ", and perhaps more"}`),
      h("pre", { class: "log found", tabindex: "0", role: "group", "aria-label": "Lines found" }, matches));
    } catch (error) {
      if (!signal.aborted) put(found, h("p", { class: "wrong", role: "alert" }, error.message));
    }
  }

  function offer() {
    const chosen = generation.value || "all";
    const numbers = Array.from({ length: Math.min(newest, MOST_LISTED) }, (_, index) => newest - index);
    put(generation, h("option", { value: "all" }, "all"), numbers.map((number) => h("option", { value: number }, number)));
    generation.value = chosen;
  }

  const lookAgain = atMostEvery(3000, look);
  rank.addEventListener("change", () => read());
  generation.addEventListener("change", () => read());
  source.addEventListener("change", () => lines.show(source.value));
  follows.addEventListener("change", () => { if (follows.checked) read(); else reading?.abort(); });
  const form = h("form", { class: "controls", role: "search", on: { submit: (event) => { event.preventDefault(); looked = search.value; look(); } } },
    h("label", { for: "log-rank" }, "rank"), rank, h("label", { for: "log-generation" }, "generation"), generation, h("label", { for: "log-source" }, "lines"), source,
    h("span", {}, follows, " ", h("label", { for: "log-follow" }, "follow")), search, h("button", { type: "submit" }, "Search"));
  signal.addEventListener("abort", () => { reading?.abort(); lookAgain.stop(); });
  return {
    element: card("Logs", [h("span", { class: "grow" }), form], found, lines.element, note),
    /** Which generation the job is in, if any: each has a log of its own. */
    show(number) {
      if (number === newest || !number) return;
      const goesOn = newest !== null;
      newest = number;
      offer();
      if (!goesOn || (isAll() && follows.checked)) read({ goesOn });
    },
  };
}
