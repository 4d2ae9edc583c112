// When the parts of a page draw themselves: one after the other, and after each the page rests for as long as it took.
// So, however busy the machine or slow the manager, half of the page's time is left to whoever clicks.
import { sleep } from "./api.js";

const LONGEST_MS = 30_000; // of one turn and of one rest: what never ends does not stop the page

let turns = Promise.resolve();

/** Do `work`, which may be asynchronous, when it is its turn. */
export function inTurn(work) {
  turns = turns.then(async () => {
    const began = performance.now();
    await Promise.race([doAndShow(work), sleep(LONGEST_MS)]);
    await sleep(Math.min(LONGEST_MS, performance.now() - began));
  });
}

async function doAndShow(work) {
  try {
    await work();
  } catch (error) {
    reportError(error); // the turns of others are not to end by it
  }
  if (!document.hidden) await new Promise((resolve) => { requestAnimationFrame(() => setTimeout(resolve)); });
}

/** Of several calls in a row, one is made, at most every `ms`, when it is its turn. */
export function atMostEvery(ms, call) {
  let asked = false;
  let stopped = false;
  let last = -Infinity;
  const ask = () => {
    if (asked) return;
    asked = true;
    setTimeout(() => inTurn(() => {
      asked = false;
      last = performance.now();
      return stopped ? null : call();
    }), Math.max(20, last + ms - performance.now()));
  };
  ask.stop = () => { stopped = true; };
  return ask;
}
