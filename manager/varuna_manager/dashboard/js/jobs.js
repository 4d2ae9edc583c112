// The page of all jobs.
import { getPage } from "./api.js";
import { submit } from "./actions.js";
import { atMostEvery, card, h, jobLink, jobLoss, jobState, put, table } from "./dom.js";
import { age, count, number, seconds, shape } from "./format.js";

const COLUMNS = [{ title: "Job", head: true }, { title: "State", kind: "nowrap" }, { title: "P×D", kind: "nowrap" }, { title: "GPUs", kind: "num" },
  { title: "Step", kind: "num" }, { title: "Loss", kind: "num" }, { title: "Examples/s", kind: "num" }, { title: "Per GPU", kind: "num" }, { title: "Step time", kind: "num" },
  { title: "Submitted", kind: "nowrap" }, { title: "Reason of the last decision", kind: "wide" }];

export function jobsPage({ root, signal, may, title }) {
  title("Jobs");
  let jobs = [];
  let next = null;
  const list = table("Jobs, newest first", COLUMNS, { empty: "No jobs match. Submit one: varuna submit JOB.yaml" });
  const which = h("select", { "aria-label": "State", on: { change: () => load() } },
    ["all", "running", "queued", "succeeded", "failed", "cancelled"].map((one) => h("option", { value: one }, one === "all" ? "all states" : one)));
  const name = h("input", { type: "search", "aria-label": "Name contains", placeholder: "Name contains…", on: { input: () => soon() } });
  const more = h("button", { type: "button", hidden: true, on: { click: () => load(next) } }, "More");
  const note = h("span", { class: "note" });
  const create = may("user") ? h("button", { type: "button", class: "main", on: { click: async () => {
    const job = await submit();
    if (job) location.hash = `#/jobs/${job.id}`;
  } } }, "Submit a job…") : null;

  async function load(from = null) {
    const query = new URLSearchParams({ limit: 100 });
    if (which.value !== "all") query.append("state", which.value);
    if (name.value) query.append("name", name.value);
    try {
      const page = await getPage(from ?? `jobs?${query}`, signal);
      jobs = from ? [...jobs, ...page.items] : page.items;
      next = page.next;
      put(note);
      draw();
    } catch (error) {
      if (!signal.aborted) put(note, error.message);
    }
  }
  function draw() {
    const gpus = ({ plan }) => (plan ? plan.p * plan.d : null);
    list.fill(jobs.map((job) => [
      jobLink(job.id, job.name), jobState(job), job.state === "queued" ? "–" : shape(job.plan?.p, job.plan?.d), count(job.gpus), count(job.step), jobLoss(job),
      number(job.examples_per_s), job.examples_per_s && gpus(job) ? number(job.examples_per_s / gpus(job)) : "–", seconds(job.step_s),
      age(job.created_at), job.error ? h("span", { class: "wrong" }, job.error.trim().split("\n").at(-1)) : job.reason,
    ]));
    more.hidden = next === null;
  }
  const soon = atMostEvery(500, () => load());
  const redraw = atMostEvery(500, draw);
  signal.addEventListener("abort", () => { soon.stop(); redraw.stop(); });

  root.append(h("div", { class: "head" }, h("h1", {}, "Jobs"), h("span", { class: "grow" }), create),
    card("All jobs", [h("span", { class: "grow" }), h("div", { class: "controls" }, name, which, note)], list.element, more));
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
