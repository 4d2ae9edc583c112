// The lines of a log, those of Varuna's runtime apart from the script's: as text, in one element.
import { h } from "./dom.js";

const MOST_CHARACTERS = 400_000;
/** As structlog writes them: a time, then a level in brackets. */
const RUNTIME = /^\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\S* \[(debug|info|warning|error|critical) *\] /;

export function logLines() {
  const element = h("pre", { class: "log", tabindex: "0", role: "group", "aria-label": "Log" });
  let tail = ""; // a line that has not ended yet
  let tailNode = null;
  let length = 0;

  function place(text, of) {
    const last = element.lastChild;
    if (last && last !== tailNode && last.className === of) last.append(text);
    else element.append(h("span", { class: of }, text));
  }
  function append(text) {
    if (!text) return;
    const atEnd = element.scrollHeight - element.scrollTop - element.clientHeight < 40;
    tailNode?.remove();
    tailNode = null;
    const lines = (tail + text).split("\n");
    tail = lines.pop();
    length += text.length;
    // Lines in a row of the same source are one element.
    for (let first = 0; first < lines.length;) {
      const of = sourceOf(lines[first]);
      let next = first + 1;
      while (next < lines.length && sourceOf(lines[next]) === of) next += 1;
      place(`${lines.slice(first, next).join("\n")}\n`, of);
      first = next;
    }
    if (tail) { tailNode = h("span", { class: sourceOf(tail) }, tail); element.append(tailNode); }
    element.normalize();
    while (length > MOST_CHARACTERS && element.childNodes.length > 1) {
      length -= element.firstChild.textContent.length;
      element.firstChild.remove();
    }
    if (atEnd) element.scrollTop = element.scrollHeight;
  }
  return {
    element, append,
    /** A line of the page itself, between two logs. */
    mark(text) {
      if (tail) append("\n");
      element.append(h("span", { class: "of-page" }, `—— ${text} ——\n`));
    },
    clear() { [tail, tailNode, length] = ["", null, 0]; element.replaceChildren(); },
    /** "all", "script" or "varuna". */
    show(source) { element.dataset.show = source; },
  };
}

const sourceOf = (line) => (RUNTIME.test(line) ? "of-varuna" : "of-script");
