// Starts the dashboard: who is there, which page is shown, and whether what it shows is current.
import { follow, get, news, sleep, token } from "./api.js";
import { h, link, put } from "./dom.js";
import { comparePage } from "./compare.js";
import { eventsPage } from "./events.js";
import { fleetPage } from "./fleet.js";
import { jobPage } from "./job.js";
import { jobsPage } from "./jobs.js";
import { loginForm } from "./login.js";
import { noticeButton, notify } from "./notices.js";
import { countFailing, currency } from "./panels.js";
import { vmPage } from "./vm.js";

const ROUTES = [
  [/^#\/jobs\/([^/]+)$/, jobPage, "#/jobs"],
  [/^#\/jobs$/, jobsPage, "#/jobs"],
  [/^#\/compare\/([^/]+)$/, comparePage, "#/jobs"],
  [/^#\/fleet$/, fleetPage, "#/fleet"],
  [/^#\/vms\/([^/]+)$/, vmPage, "#/fleet"],
  [/^#\/events$/, eventsPage, "#/events"],
];
const RANK = { viewer: 0, user: 1, admin: 2 };
const byId = (id) => document.getElementById(id);

let shown = null; // {page, controller}
let streaming = null;
let me = null;

const may = (role) => me !== null && RANK[me.role] >= RANK[role];

function showPage() {
  if (me === null) return;
  shown?.controller.abort();
  const hash = location.hash || "#/jobs";
  const found = ROUTES.map(([pattern, page, tab]) => [pattern.exec(hash), page, tab]).find(([match]) => match);
  if (!found) { location.replace("#/jobs"); return; }
  const [match, page, tab] = found;
  for (const each of document.querySelectorAll("nav a")) {
    if (each.getAttribute("href") === tab) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  const controller = new AbortController();
  const root = h("div", { class: "page" }); // what a page of before still draws goes nowhere
  byId("main").replaceChildren(root);
  const first = shown === null;
  const context = {
    root, signal: controller.signal, may, argument: match[1] ? decodeURIComponent(match[1]) : null,
    title: (text) => { document.title = `${text} · Varuna`; },
  };
  shown = { controller, page: page(context) };
  if (!first) { byId("main").focus({ preventScroll: true }); scrollTo(0, 0); }
}

const QUIET_S = 20; // the stream has something each 15 s
let stream = "connecting"; // or "live", "away", "standby", "signed out"
let heardAt = 0;

/** The badge says "live" only while events come and every panel that is shown is current. */
function drawBadge() {
  const quietS = Math.round((Date.now() - heardAt) / 1000);
  const failing = countFailing();
  const [symbol, text, tone] = {
    connecting: ["…", "connecting", "quiet"], away: ["✘", "no connection", "bad"], standby: ["◐", "stands by", "warn"], "signed out": ["○", "signed out", "quiet"],
    live: quietS > QUIET_S ? ["◌", `nothing heard for ${quietS} s`, "warn"]
      : failing ? ["◐", failing === 1 ? "1 panel is not current" : `${failing} panels are not current`, "warn"] : ["●", "live", "good"],
  }[stream];
  byId("connection").className = tone;
  put(byId("connection"), h("span", { "aria-hidden": "true" }, `${symbol} `), text);
}
function setStream(state) { stream = state; drawBadge(); }
currency.addEventListener("change", drawBadge);
setInterval(drawBadge, 2000);
news.addEventListener("heard", () => { heardAt = Date.now(); });

function banner(...content) {
  put(byId("banner"), ...content);
}

news.addEventListener("reached", () => {
  const wasAway = byId("banner").childNodes.length > 0;
  heardAt = Date.now();
  setStream("live");
  banner();
  if (wasAway) shown?.page.refresh?.();
});
news.addEventListener("unreachable", () => {
  if (me === null) return;
  setStream("away");
  banner("The manager cannot be reached. This page shows the last known state; training goes on. Trying again…");
});
news.addEventListener("standby", ({ detail }) => {
  setStream("standby");
  banner(`${detail.text} `, detail.leader ? link(new URL(`/${location.hash}`, detail.leader).href, `Go to the leader, ${detail.leader}`) : "");
});
news.addEventListener("signed-out", ({ detail }) => signOut(token.get() ? detail : ""));

function signOut(reason = "") {
  token.clear();
  me = null;
  streaming?.abort();
  shown?.controller.abort();
  shown = null;
  banner();
  put(byId("who"));
  byId("sign-out").hidden = true;
  setStream("signed out");
  document.title = "Sign in · Varuna";
  const form = loginForm(reason, (text) => { token.set(text); start(); });
  byId("main").replaceChildren(form);
  form.querySelector("input").focus();
}

async function start() {
  setStream("connecting");
  for (let tries = 0; me === null; tries += 1) {
    try {
      me = await get("whoami");
    } catch (error) {
      if (error.status === 401) return; // the form is shown
      banner(`The manager does not answer: ${error.message}. Trying again…`);
      await sleep(Math.min(8000, 500 * 2 ** tries));
    }
  }
  banner();
  put(byId("who"), me.open ? "" : `${me.name} (${me.role})`);
  byId("sign-out").hidden = me.open;
  const controller = new AbortController();
  streaming = controller;
  const newest = get("events?order=desc&limit=1").catch(() => []);
  showPage();
  follow((await newest)[0]?.id ?? 0, (kind, data) => {
    if (kind === "progress") shown?.page.onProgress?.(data);
    else {
      notify(data);
      shown?.page.onEvent?.(data);
    }
  }, controller.signal);
}

addEventListener("hashchange", showPage);
// A hash of its own would leave the page that is shown.
byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId("main").focus(); });
byId("who").before(noticeButton());
byId("sign-out").addEventListener("click", () => signOut());
start();
