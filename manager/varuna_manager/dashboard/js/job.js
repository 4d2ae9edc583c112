// The page of one job: what it is doing, how fast, on what, and what it cost.
import { Problem, Unreachable, get, getOrNull } from "./api.js";
import { jobActions } from "./actions.js";
import { atMostEvery, figures, h, jobLoss, jobState, link, put } from "./dom.js";
import { eventList } from "./events.js";
import { age, clock, count, number, seconds, secondsSince, shape, signedPercent } from "./format.js";
import { Generations } from "./generations.js";
import { rateAndLoss } from "./job_charts.js";
import { grid } from "./job_grid.js";
import { pipeline } from "./job_pipeline.js";
import { checkpoints, cost, generationsTable, plans, timeLost } from "./job_tables.js";
import { logs } from "./logs.js";
import { Series } from "./series.js";

const OVER = ["succeeded", "failed", "cancelled"];
const SLOW_MS = 15_000; // what changes slowly, and no event tells of
const HEALTH_MS = 4_000;

export function jobPage({ root, signal, may, argument, title }) {
  const about = { job: null, generations: [], current: null, series: new Series(argument), plans: [], may, signal };
  const pages = new Generations();
  const head = h("div", { class: "head" });
  const summary = h("div");
  const trouble = h("div");
  const parts = {
    charts: rateAndLoss(signal), grid: grid(), pipeline: pipeline(signal), plans: plans(), time: timeLost(),
    cost: cost(), checkpoints: checkpoints(argument, signal), generations: generationsTable(),
  };
  let events = null;
  let log = null;
  title("Job");
  root.append(head, trouble, summary);

  function drawHead() {
    const { job } = about;
    title(job.name);
    put(head, h("h1", {}, job.name), jobState(job), h("span", { class: "crumb" }, link("#/jobs", "all jobs"), ` / ${job.id}`),
      h("span", { class: "grow" }), ...jobActions(job, () => about.job, may, () => refresh()));
    put(trouble, job.error ? h("pre", { class: "error", tabindex: "0", "aria-label": "Error of the job" }, job.error) : null,
      job.reason ? h("p", { class: "reason" }, job.reason) : null);
    const plan = job.plan;
    const over = OVER.includes(job.state);
    put(summary, figures(
      ["Shape P×D", plan ? shape(plan.p, plan.d) : "–", plan ? `micro-batch ${plan.micro_batch} of ${plan.global_batch}` : "not planned yet"],
      ["Step", count(job.step), job.last_step_at ? `last ${age(job.last_step_at)}` : null],
      ["Loss", jobLoss(job), oddSteps(job)],
      ["Examples/s", number(job.examples_per_s), job.rate_steps > 1 ? `over the last ${job.rate_steps} steps` : null],
      ["Examples/s per GPU", job.examples_per_s && plan ? number(job.examples_per_s / (plan.p * plan.d)) : "–", plan ? plan.p * plan.d === 1 ? "1 GPU" : `${plan.p * plan.d} GPUs` : null],
      ["Step time", seconds(job.step_s), stepParts(job, plan?.predicted_minibatch_s)],
      ["Generation", count(job.generation), about.current ? `${about.current.kind}, ${about.current.state}` : null],
      [over ? "Ran" : "Running for", seconds(job.started_at ? (over ? secondsSince(job.started_at) - secondsSince(job.finished_at) : secondsSince(job.started_at)) : null),
        `submitted ${clock(job.created_at)}`],
    ));
  }

  async function refreshJob() {
    about.job = await get(`jobs/${encodeURIComponent(argument)}`, signal);
    await pages.refresh(about.job.id, signal);
    about.generations = pages.list;
    about.current = about.generations.at(-1) ?? null;
    drawHead();
  }

  async function refreshCharts() {
    await about.series.update(about.generations, signal);
    parts.charts.draw(about);
  }

  /** Once for each page: the charts and the table are drawn with the newest generations first. */
  async function addOlder() {
    while (await pages.addOlder(signal)) {
      about.generations = pages.list;
      parts.charts.draw(about);
      parts.generations.draw(about.generations);
    }
  }

  async function refreshHealth() {
    const newest = about.generations.filter((one) => one.kind === "training").at(-1) ?? about.current;
    const whole = newest ? await get(`jobs/${about.job.id}/generations/${newest.number}`, signal) : null;
    const vms = whole && whole.state !== "ended" ? await get(`vms?job=${about.job.id}&gone=false&limit=5000`, signal) : [];
    parts.grid.draw(whole, vms);
  }

  async function refreshSlow() {
    const base = `jobs/${about.job.id}`;
    const tasks = [
      getOrNull(`${base}/pipeline`, signal).then((found) => parts.pipeline.draw(found)),
      Promise.all([get(`${base}/plans?limit=30`, signal), getOrNull(`${base}/plans/newest`, signal)]).then(([list, newest]) => parts.plans.draw(list, newest)),
      get(`${base}/time`, signal).then((found) => parts.time.draw(found)),
      get(`${base}/cost?vms=100`, signal).then((found) => parts.cost.draw(found)),
      parts.checkpoints.refresh(),
    ];
    parts.generations.draw(about.generations);
    await Promise.all(tasks);
  }

  const quietly = (work) => async () => {
    if (document.hidden && about.job) return;
    try {
      await work();
    } catch (error) {
      if (!(error instanceof Problem || error instanceof Unreachable)) throw error; // a mistake of this page
      if (!signal.aborted && error instanceof Problem && error.status !== 401) put(trouble, h("p", { class: "wrong", role: "alert" }, error.message));
    }
  };
  const refresh = quietly(async () => {
    await refreshJob();
    if (!log) open();
    log.show(about.job.generation);
    await Promise.all([refreshCharts(), refreshHealth(), refreshSlow()]);
    await addOlder();
  });
  const onChange = atMostEvery(1000, refresh);
  const onSteps = atMostEvery(2000, quietly(refreshCharts));
  const onHead = atMostEvery(500, drawHead);
  const slow = setInterval(() => { if (!OVER.includes(about.job?.state)) onChange(); }, SLOW_MS);
  const health = setInterval(() => { if (about.job?.state === "running") quietly(refreshHealth)(); }, HEALTH_MS);
  const whenSeen = () => { if (!document.hidden) onChange(); };
  document.addEventListener("visibilitychange", whenSeen);
  signal.addEventListener("abort", () => {
    [onChange, onSteps, onHead].forEach((each) => each.stop());
    clearInterval(slow);
    clearInterval(health);
    document.removeEventListener("visibilitychange", whenSeen);
  });

  /** The parts below the head, once it is known that there is such a job. */
  function open() {
    events = eventList({ about: { job: about.job.id }, signal, ofJob: true });
    log = logs(about.job, signal);
    root.append(parts.charts.element,
      parts.grid.element, parts.pipeline.element, parts.plans.element,
      h("div", { class: "columns" }, parts.time.element, parts.checkpoints.element), parts.generations.element, parts.cost.element,
      events.element, log.element);
  }

  refresh();
  return {
    refresh: () => { refresh(); events?.reload(); },
    onEvent(event) {
      if (event.job_id !== about.job?.id) return;
      events?.add(event);
      onChange();
    },
    onProgress(progress) {
      if (progress.job_id !== about.job?.id) return;
      Object.assign(about.job, { step: progress.step, loss: progress.loss, step_s: progress.step_s, between_s: progress.between_s,
        examples_per_s: progress.examples_per_s, rate_steps: progress.rate_steps, last_step_at: progress.at });
      onHead();
      onSteps();
    },
  };
}

/** Which steps had no finite loss or gradient; null: none. */
function oddSteps({ not_finite_from: since, steps_skipped: skipped }) {
  const parts = [since !== null && `no finite loss or gradient since step ${count(since)}`, skipped > 0 && `${count(skipped)} ${skipped === 1 ? "step" : "steps"} skipped`];
  const text = parts.filter(Boolean).join(", ");
  return text ? h("span", { class: since === null ? "" : "wrong" }, text) : null;
}

/** What of the step time lies between steps, and what was predicted for the rest. */
function stepParts({ step_s: step, between_s: between }, predicted) {
  const told = step && between / step >= 0.02;
  const off = step && predicted ? ` (${signedPercent((step - between) / predicted - 1)})` : "";
  return [told && `${seconds(between)} between steps`, predicted && `predicted${told ? " for the rest" : ""} ${seconds(predicted)}${off}`].filter(Boolean).join("; ") || null;
}
