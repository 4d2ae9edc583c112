// Calls of the REST API, with the token of this tab, and the stream of events.
const API = "api/v1/";
const TOKEN = "varuna-token";
const RETRY_MS = [500, 1000, 2000, 4000, 8000];
const SILENCE_MS = 40_000; // the manager says something at least each 15 s

/** What the manager answered instead: a problem document (RFC 9457). */
export class Problem extends Error {
  constructor(status, document) {
    super(document?.detail ?? `the manager answered ${status}`);
    this.status = status;
    this.errors = document?.errors ?? [];
    this.leader = document?.leader ?? null;
  }
}

/** The manager did not answer, or the page that asked is over. */
export class Unreachable extends Error {}

/** What tells the page of the stream of events: `signed-out`, `reached`, `heard` (anything), `unreachable`, `standby`. */
export const news = new EventTarget();
const tell = (type, detail) => news.dispatchEvent(new CustomEvent(type, { detail }));

// The token stays in this tab: it is gone when the tab is closed, and no other page can read it.
export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (text) => sessionStorage.setItem(TOKEN, text),
  clear: () => sessionStorage.removeItem(TOKEN),
};

function headers(more = {}) {
  const text = token.get();
  return text ? { Authorization: `Bearer ${text}`, ...more } : more;
}

async function call(path, options) {
  const response = await reach(() => fetch(API + path, { cache: "no-store", ...options, headers: headers(options.headers) }));
  if (response.ok) return response;
  const problem = new Problem(response.status, await response.json().catch(() => null));
  if (response.status === 401) tell("signed-out", problem.message);
  throw problem;
}

/** What `ask` resolves to: an answer, or the body of one. */
async function reach(ask) {
  try {
    return await ask();
  } catch (error) {
    if (error instanceof SyntaxError) throw error; // of a body that is whole
    throw new Unreachable("the manager cannot be reached", { cause: error });
  }
}

const readJson = (response) => reach(() => response.json());

export async function get(path, signal) {
  return readJson(await call(path, { signal }));
}

/** The answer and the address of the next page, or null. */
export async function getPage(path, signal) {
  const response = await call(path, { signal });
  const next = /<[^>]*\/api\/v1\/([^>]+)>;\s*rel="?next"?/.exec(response.headers.get("Link") ?? "");
  return { items: await readJson(response), next: next ? next[1] : null };
}

/** Null where there is none yet. */
export async function getOrNull(path, signal) {
  try {
    return await get(path, signal);
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
}

export async function getBytes(path, signal) {
  const response = await call(path, { signal });
  const header = (name) => Number(response.headers.get(name));
  return {
    bytes: new Uint8Array(await reach(() => response.arrayBuffer())),
    generation: header("Log-Generation"), offset: header("Log-Offset"), next: header("Log-Next-Offset"), size: header("Log-Size"),
  };
}

export async function send(method, path, body = undefined, more = {}) {
  const response = await call(path, {
    method, headers: { "Content-Type": "application/json", ...more }, body: body === undefined ? undefined : JSON.stringify(body),
  });
  return response.status === 204 ? null : readJson(response);
}

export const sleep = (ms, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, ms);
  signal?.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
});

/** Follow all events after number `after`, for ever; goes on where it was after every break. */
export async function follow(after, onMessage, signal) {
  let failures = 0;
  while (!signal.aborted) {
    const watch = new AbortController();
    signal.addEventListener("abort", () => watch.abort(), { signal: watch.signal });
    try {
      const response = await call("events/stream", { signal: watch.signal, headers: { "Last-Event-ID": String(after) } });
      tell("reached");
      failures = 0;
      for await (const message of messages(response.body, watch)) {
        if (message.id !== null) after = message.id;
        onMessage(message.event, message.data);
      }
      if (!signal.aborted) tell("unreachable"); // it ended: the manager is going away, or no longer leads
    } catch (error) {
      if (signal.aborted || error.status === 401) return;
      if (error.status === 503) tell("standby", { text: error.message, leader: error.leader });
      else tell("unreachable");
    } finally {
      watch.abort();
    }
    await sleep(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)] * (0.75 + Math.random() / 2), signal);
    failures += 1;
  }
}

// Server-sent events (WHATWG HTML, 9.2) by fetch, which can send the token as a header; EventSource cannot.
async function* messages(body, watch) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let silence = setTimeout(() => watch.abort(), SILENCE_MS);
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      tell("heard");
      clearTimeout(silence);
      silence = setTimeout(() => watch.abort(), SILENCE_MS);
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const fields = Object.fromEntries(part.split("\n").map((line) => {
          const colon = line.indexOf(":");
          return [line.slice(0, colon), line.slice(colon + 1).trimStart()];
        }));
        if (fields.data) yield { id: fields.id ? Number(fields.id) : null, event: fields.event, data: JSON.parse(fields.data) };
      }
    }
  } finally {
    clearTimeout(silence);
  }
}
