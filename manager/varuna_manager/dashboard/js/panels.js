// What a panel knows of its data: that it waits for the first answer, that a request failed and when it is made again, or
// that what it shows is current. The page's badge counts the panels that are not.
import { Problem, Unreachable, sleep } from "./api.js";
import { h, put } from "./dom.js";
import { clock } from "./format.js";

const RETRY_S = [2, 4, 8, 15, 30];
const failing = new Set();

/** Dispatches `change` when the number of panels that are not current does. */
export const currency = new EventTarget();
export const countFailing = () => failing.size;

function setFailing(panel, fails) {
  if (failing.has(panel) === fails) return;
  if (fails) failing.add(panel); else failing.delete(panel);
  currency.dispatchEvent(new Event("change"));
}

/** How long until attempt number `failures` + 1. */
export const retrySeconds = (failures) => RETRY_S[Math.min(failures, RETRY_S.length) - 1];

/** The line in which a panel says that it loads or has failed. It is announced to screen readers. */
export const stateLine = () => h("div", { class: "panel-state", role: "status" });

/** What a failed request says. `since`: when what is still shown was current, null: nothing is shown. */
export function describeFailure(message, since, retryS, retry) {
  return h("div", { class: "failed" }, h("span", { class: "mark", "aria-hidden": "true" }, "✘"),
    h("span", {}, since === null ? "Not loaded: " : `Not current, shown as of ${clock(since)}: `, message,
      retryS === null ? "." : `. Trying again in ${retryS} s.`),
    h("button", { type: "button", on: { click: retry } }, "Try now"));
}

/**
 * The requests of a panel, or of several that one answer fills: `load` asks and draws. Returns a function that loads, and never rejects for what the manager
 * did not answer: the panel's cards say it, keep what they show, and the request is made again until it succeeds.
 */
export function requests(elements, load, signal) {
  const places = [elements].flat().flatMap((element) => {
    const cards = element.matches(".card") ? [] : [...element.querySelectorAll(".card")];
    return cards.length ? cards : [element];
  });
  const lines = places.map((place) => {
    const line = stateLine();
    const header = place.querySelector(":scope > header");
    if (header) header.after(line); else place.prepend(line);
    place.classList.add("unloaded");
    put(line, h("div", { class: "loading" }, "Loading…"));
    return [place, line];
  });
  const panel = {};
  let failures = 0;
  let currentAt = null;
  let waiting = null; // ends the pause before the next attempt
  let running = null;
  let next = null; // asked for while one is running, perhaps with another filter

  async function attempt() {
    waiting?.abort();
    try {
      await load();
    } catch (error) {
      if (signal.aborted || error.status === 401) return;
      if (!(error instanceof Problem || error instanceof Unreachable)) throw error; // a mistake of the page
      fail(error);
      return;
    }
    failures = 0;
    currentAt = Date.now();
    setFailing(panel, false);
    for (const [place, line] of lines) { place.classList.remove("unloaded"); put(line); }
  }

  function fail(error) {
    failures += 1;
    setFailing(panel, true);
    // What the manager refuses for the request's own sake it will refuse again.
    const again = !(error.status >= 400 && error.status < 500) || error.status === 429;
    const seconds = again ? retrySeconds(failures) : null;
    // Once is enough where something is shown.
    for (const [, line] of currentAt === null ? lines : lines.slice(0, 1)) put(line, describeFailure(error.message, currentAt, seconds, () => { refresh(); }));
    if (!again) return;
    waiting = new AbortController();
    const mine = waiting;
    sleep(1000 * seconds, AbortSignal.any([mine.signal, signal])).then(() => { if (!mine.signal.aborted && !signal.aborted) refresh(); });
  }

  function refresh() {
    if (running) {
      next ??= running.then(() => { next = null; return refresh(); });
      return next;
    }
    running = attempt().finally(() => { running = null; });
    return running;
  }
  signal.addEventListener("abort", () => setFailing(panel, false));
  return refresh;
}
