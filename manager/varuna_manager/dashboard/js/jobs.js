// The page of all jobs.
import { getPage } from "./api.js";
import { compareLink } from "./compare.js";
import { submitAndShow } from "./submit.js";
import { ago, card, h, jobLink, jobLoss, jobState, put, table } from "./dom.js";
import { count, number, seconds, shape } from "./format.js";
import { requests } from "./panels.js";
import { atMostEvery } from "./turns.js";

const MOST_COMPARED = 6;
const PAGE = 100;
const LARGEST_PAGE = 1000; // that the manager gives
const COLUMNS = [{ title: "", label: "Compare" }, { title: "Job", head: true }, { title: "State", kind: "nowrap" }, { title: "P×D", kind: "nowrap" }, { title: "GPUs", kind: "num" },
  { title: "Step", kind: "num" }, { title: "Loss", kind: "num" }, { title: "Examples/s", kind: "num" }, { title: "Per GPU", kind: "num" }, { title: "Step time", kind: "num" },
  { title: "Submitted", kind: "nowrap" }, { title: "Reason of the last decision", kind: "wide" }];

export function jobsPage({ root, signal, may, title }) {
  title("Jobs");
  let jobs = [];
  let next = null;
  let shown = PAGE; // how many jobs are asked for: "More" adds a page
  const chosen = new Set(); // jobs to compare
  const compare = h("button", { type: "button", disabled: true, on: { click: () => { location.hash = compareLink([...chosen]); } } }, "Compare");
  const list = table("Jobs, newest first", COLUMNS, { empty: "No jobs match. Submit one: varuna submit JOB.yaml" });
  const which = h("select", { "aria-label": "State", on: { change: () => first() } },
    ["all", "running", "queued", "succeeded", "failed", "cancelled"].map((one) => h("option", { value: one }, one === "all" ? "all states" : one)));
  const name = h("input", { type: "search", "aria-label": "Name contains", placeholder: "Name contains…", on: { input: () => { shown = PAGE; soon(); } } });
  const more = h("button", { type: "button", hidden: true, on: { click: () => { shown = jobs.length + PAGE; load(); } } }, "More");
  const create = may("user") ? h("button", { type: "button", class: "main", on: { click: () => submitAndShow() } }, "Submit a job…") : null;

  async function ask() {
    const query = new URLSearchParams({ limit: Math.min(shown, LARGEST_PAGE) });
    if (which.value !== "all") query.append("state", which.value);
    if (name.value) query.append("name", name.value);
    const found = [];
    for (next = `jobs?${query}`; next !== null && found.length < shown;) {
      const page = await getPage(next, signal);
      found.push(...page.items);
      next = page.next;
    }
    jobs = found;
    draw();
  }
  const gpus = ({ plan }) => (plan ? plan.p * plan.d : null);
  /** Of a job that does not run, its page has them, with the steps that they are of. */
  const rates = (job) => (job.state === "running" ? [number(job.examples_per_s), job.examples_per_s && gpus(job) ? number(job.examples_per_s / gpus(job)) : "–", seconds(job.step_s)] : ["–", "–", "–"]);
  function draw() {
    list.fill(jobs.map((job) => [
      h("input", { type: "checkbox", value: job.id, "aria-label": `Compare ${job.name}`, checked: chosen.has(job.id) }),
      jobLink(job.id, job.name), jobState(job), job.state === "queued" ? "–" : shape(job.plan?.p, job.plan?.d), count(job.gpus), count(job.step), jobLoss(job),
      ...rates(job),
      ago(job.created_at), job.error ? h("span", { class: "wrong" }, job.error.trim().split("\n").at(-1)) : job.reason,
    ]));
    more.hidden = next === null;
  }
  function first() { shown = PAGE; return load(); }
  const soon = atMostEvery(500, () => load());
  const redraw = atMostEvery(500, draw);
  signal.addEventListener("abort", () => { soon.stop(); redraw.stop(); });

  const all = card("All jobs", [h("span", { class: "grow" }), h("div", { class: "controls" }, compare, name, which)], list.element, more);
  const load = requests(all, ask, signal);
  root.append(h("div", { class: "head" }, h("h1", {}, "Jobs"), h("span", { class: "grow" }), create), all);
  list.body.addEventListener("change", ({ target }) => {
    if (target.checked) chosen.add(target.value); else chosen.delete(target.value);
    compare.disabled = chosen.size < 2 || chosen.size > MOST_COMPARED;
    put(compare, chosen.size > MOST_COMPARED ? `Compare at most ${MOST_COMPARED}` : chosen.size ? `Compare ${chosen.size}` : "Compare");
  });
  load();
  return {
    refresh: () => load(),
    onEvent: (event) => { if (event.job_id && event.kind !== "checkpoint") soon(); },
    onProgress: (progress) => {
      const job = jobs.find((one) => one.id === progress.job_id);
      if (!job) return;
      Object.assign(job, { step: progress.step, loss: progress.loss, step_s: progress.step_s, between_s: progress.between_s, examples_per_s: progress.examples_per_s, rate_steps: progress.rate_steps });
      redraw();
    },
  };
}
