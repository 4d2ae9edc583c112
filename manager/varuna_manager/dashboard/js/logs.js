// The log of a rank: its end, followed by long polls; and what a search finds.
import { get, getBytes, sleep } from "./api.js";
import { atMostEvery, card, h, put } from "./dom.js";
import { bytes, count } from "./format.js";

const TAIL_BYTES = 64 * 1024;
const MOST_CHARACTERS = 400_000;
const WAIT_S = 20;

export function logs(job, signal) {
  const rank = h("input", { type: "number", min: "0", step: "1", value: "0", id: "log-rank", size: "5" });
  const generation = h("input", { type: "number", min: "1", step: "1", placeholder: "newest", id: "log-generation", size: "6" });
  const follows = h("input", { type: "checkbox", id: "log-follow", checked: true });
  const search = h("input", { type: "search", placeholder: "Search this log…", "aria-label": "Search this log" });
  const area = h("pre", { class: "log", tabindex: "0", role: "group", "aria-label": "Log" });
  const note = h("p", { class: "note", role: "status" }, "No logs yet.");
  const found = h("div");
  let reading = null; // the AbortController of the read under way
  let newest = null; // the job's generation, as the page knows it
  let looked = ""; // what the lines found have in them

  const about = (fields) => new URLSearchParams({ rank: rank.value || 0, ...(generation.value ? { generation: generation.value } : {}), ...fields });

  async function read({ goesOn = false } = {}) {
    reading?.abort();
    const mine = new AbortController();
    reading = mine;
    const stop = AbortSignal.any([mine.signal, signal]);
    if (goesOn) append(`—— generation ${newest} ——\n`);
    else area.textContent = "";
    look();
    const decoder = new TextDecoder();
    let offset = -TAIL_BYTES;
    let isCut = false;
    let failures = 0;
    while (!stop.aborted) {
      try {
        const part = await getBytes(`jobs/${job.id}/logs?${about({ offset, wait_s: offset > 0 ? WAIT_S : 0 })}`, stop);
        failures = 0;
        if (offset < 0) isCut = part.offset > 0;
        offset = part.next;
        append(decoder.decode(part.bytes, { stream: true }));
        put(note, `generation ${part.generation}, rank ${rank.value}: ${bytes(part.size)}${isCut ? ", its end" : ""}`);
        if (!follows.checked) return;
        if (part.bytes.length === 0) await sleep(1000, stop);
      } catch (error) {
        if (stop.aborted) return;
        put(note, error.message);
        failures += 1;
        await sleep(Math.min(30_000, 1000 * 2 ** failures), stop);
        if (!follows.checked) return;
      }
    }
  }

  function append(text) {
    if (!text) return;
    const atEnd = area.scrollHeight - area.scrollTop - area.clientHeight < 40;
    area.append(text);
    area.normalize();
    if (area.textContent.length > MOST_CHARACTERS) area.textContent = area.textContent.slice(-MOST_CHARACTERS / 2);
    if (atEnd) area.scrollTop = area.scrollHeight;
    if (looked && text.toLowerCase().includes(looked.toLowerCase())) lookAgain();
  }

  async function look() {
    const wanted = looked;
    if (!wanted) { put(found); return; }
    try {
      const answer = await get(`jobs/${job.id}/logs/search?${about({ q: wanted, limit: 200 })}`, signal);
      if (wanted !== looked) return;
      put(found, h("p", { class: "note", role: "status" }, `${count(answer.matches.length)} ${answer.matches.length === 1 ? "line" : "lines"} with “${wanted}” in ${bytes(answer.searched_bytes)} of generation ${answer.generation}${answer.complete ? "" : ", and perhaps more"}`),
        h("pre", { class: "log found", tabindex: "0", role: "group", "aria-label": "Lines found" }, answer.matches.map((match) => `${match.line_number}: ${match.text}\n`)));
    } catch (error) {
      if (!signal.aborted) put(found, h("p", { class: "wrong", role: "alert" }, error.message));
    }
  }

  const lookAgain = atMostEvery(3000, look);
  rank.addEventListener("change", () => read());
  generation.addEventListener("change", () => read());
  follows.addEventListener("change", () => { if (follows.checked) read(); else reading?.abort(); });
  const form = h("form", { class: "controls", role: "search", on: { submit: (event) => { event.preventDefault(); looked = search.value; look(); } } },
    h("label", { for: "log-rank" }, "rank"), rank, h("label", { for: "log-generation" }, "generation"), generation,
    follows, h("label", { for: "log-follow" }, "follow"), search, h("button", { type: "submit" }, "Search"));
  signal.addEventListener("abort", () => { reading?.abort(); lookAgain.stop(); });
  return {
    element: card("Logs", [h("span", { class: "grow" }), form], found, area, note),
    /** Which generation the job is in: each has a log of its own. */
    show(number) {
      if (number === newest) return;
      const goesOn = newest !== null;
      newest = number;
      if (!goesOn || (generation.value === "" && follows.checked)) read({ goesOn });
    },
  };
}
