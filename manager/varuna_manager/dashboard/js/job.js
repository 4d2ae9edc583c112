// The page of one job: what it is doing, how fast, on what, and what it cost.
import { get, getOrNull } from "./api.js";
import { jobActions } from "./actions.js";
import { ago, figures, h, jobLoss, jobState, link, put, when } from "./dom.js";
import { eventList } from "./events.js";
import { count, countOf, number, seconds, secondsSince, shape, signedPercent } from "./format.js";
import { Generations } from "./generations.js";
import { grid } from "./job_grid.js";
import { pipeline } from "./job_pipeline.js";
import { checkpoints, cost, generationsTable, plans, timeLost } from "./job_tables.js";
import { logs } from "./logs.js";
import { metricCharts } from "./metric_charts.js";
import { requests } from "./panels.js";
import { Series } from "./series.js";
import { atMostEvery } from "./turns.js";

const OVER = ["succeeded", "failed", "cancelled"];
const SLOW_MS = 15_000; // what changes slowly, and no event tells of
const HEALTH_MS = 4_000; // workers that make no step, or not yet
const MANY_RANKS = 64; // of more than these the overview is asked for less often

export function jobPage({ root, signal, may, argument, title }) {
  const about = { job: null, generations: [], series: new Series(argument), };
  const pages = new Generations();
  const head = h("div", { class: "head" });
  const summary = h("div");
  const trouble = h("div");
  const parts = {
    charts: metricCharts(signal), grid: grid(), pipeline: pipeline(signal), plans: plans(), time: timeLost(),
    cost: cost(), checkpoints: checkpoints(argument, signal), generations: generationsTable(),
  };
  let events = null;
  let log = null;
  title("Job");
  const top = h("div", { class: "page" }, head, trouble, summary);
  root.append(top);

  /** The head, the tiles and the ranks are of one moment: that of one answer. */
  function drawOverview({ job, generation, vms }) {
    about.job = job;
    title(job.name);
    put(head, h("h1", {}, job.name), jobState(job), h("span", { class: "crumb" }, link("#/jobs", "all jobs"), ` / ${job.id}`),
      h("span", { class: "grow" }), ...jobActions(job, () => about.job, may, () => refresh()));
    put(trouble, job.error ? h("pre", { class: "error", tabindex: "0", "aria-label": "Error of the job" }, job.error) : null,
      job.reason ? h("p", { class: "reason" }, job.reason) : null);
    const plan = job.plan;
    const over = OVER.includes(job.state);
    put(summary, figures(
      ["Shape P×D", plan ? shape(plan.p, plan.d) : "–", plan ? [`micro-batch ${plan.micro_batch} of ${plan.global_batch}`, ...gpuTypes(plan)].join(", ") : "not planned yet"],
      ["Step", count(job.step), job.last_step_at ? ["last ", ago(job.last_step_at)] : null],
      ["Loss", jobLoss(job), oddSteps(job)],
      ["Examples/s", number(job.examples_per_s), job.rate_steps > 1 ? `over the last ${job.rate_steps} steps` : null],
      ["Examples/s per GPU", job.examples_per_s && plan ? number(job.examples_per_s / (plan.p * plan.d)) : "–", plan ? countOf(plan.p * plan.d, "GPU") : null],
      ["Step time", seconds(job.step_s), stepParts(job, plan?.predicted_minibatch_s)],
      ["Generation", count(job.generation), generation ? `${generation.kind}, ${generation.state}` : null],
      [over ? "Ran" : "Running for", seconds(job.started_at ? (over ? secondsSince(job.started_at) - secondsSince(job.finished_at) : secondsSince(job.started_at)) : null),
        ["submitted ", when(job.created_at)]],
    ));
    parts.grid.draw(generation, vms);
  }

  const refreshOverview = requests(top, async () => {
    drawOverview(await get(`jobs/${encodeURIComponent(argument)}/overview`, signal));
    if (!log) open();
    log.show(about.job.generation);
  }, signal);

  let wantsOlder = false;
  const ask = {}; // the requests of the panels below the head, once it is known that there is such a job

  async function askGenerations() {
    await pages.refresh(about.job.id, signal);
    drawGenerations();
    while (wantsOlder && await pages.addOlder(signal)) { drawGenerations(); drawSteps(); }
  }
  function drawGenerations() {
    about.generations = pages.list;
    parts.generations.draw(about.generations);
  }
  function drawSteps() {
    parts.charts.draw([{ id: about.job.id, name: about.job.name, series: about.series, generations: about.generations }]);
  }

  async function askSteps() {
    await about.series.update(about.generations, signal);
    drawSteps();
  }

  /** The parts below the head. */
  function open() {
    events = eventList({ about: { job: about.job.id }, signal, ofJob: true });
    log = logs(about.job, signal);
    root.append(parts.charts.element,
      parts.grid.element, parts.pipeline.element, parts.plans.element,
      h("div", { class: "columns" }, parts.time.element, parts.checkpoints.element), parts.generations.element, parts.cost.element,
      events.element, log.element);
    const base = `jobs/${about.job.id}`;
    const panel = (part, load) => requests(part.element, load, signal);
    ask.steps = panel(parts.charts, askSteps);
    ask.slow = [
      panel(parts.pipeline, async () => parts.pipeline.draw(await getOrNull(`${base}/pipeline`, signal))),
      panel(parts.plans, async () => parts.plans.draw(...await Promise.all([get(`${base}/plans?limit=30`, signal), getOrNull(`${base}/plans/newest`, signal)]))),
      panel(parts.time, async () => parts.time.draw(await get(`${base}/time`, signal))),
      panel(parts.cost, async () => parts.cost.draw(await get(`${base}/cost?vms=100`, signal))),
      panel(parts.checkpoints, () => parts.checkpoints.refresh()),
    ];
    ask.generations = panel(parts.generations, askGenerations);
    refreshBelow();
  }

  async function refreshBelow() {
    ask.slow.forEach((each) => each()); // the head and the charts do not wait for these
    await ask.generations(); // its shapes are marks in the charts
    await ask.steps();
    if (wantsOlder) return;
    wantsOlder = true; // the newest are drawn: the others may take their time
    await ask.generations();
  }

  const unseen = () => document.hidden && about.job;
  async function refresh() {
    if (unseen()) return;
    const isOpen = Boolean(log);
    await refreshOverview();
    if (isOpen) await refreshBelow();
  }
  const onChange = atMostEvery(1000, refresh);
  const onSteps = atMostEvery(2000, () => (unseen() ? null : ask.steps?.()));
  const often = atMostEvery(1000, () => (unseen() ? null : refreshOverview()));
  const seldom = atMostEvery(4000, () => (unseen() ? null : refreshOverview()));
  const onHead = () => ((about.job?.gpus ?? 0) > MANY_RANKS ? seldom() : often());
  const health = setInterval(() => { if (about.job?.state === "running") onHead(); }, HEALTH_MS);
  const slow = setInterval(() => { if (!OVER.includes(about.job?.state)) onChange(); }, SLOW_MS);
  const whenSeen = () => { if (!document.hidden) onChange(); };
  document.addEventListener("visibilitychange", whenSeen);
  signal.addEventListener("abort", () => {
    [onChange, onSteps, often, seldom].forEach((each) => each.stop());
    clearInterval(slow);
    clearInterval(health);
    document.removeEventListener("visibilitychange", whenSeen);
  });

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
      onHead();
      onSteps();
    },
  };
}

/** How many GPUs of each type a plan has, if they are of several. */
function gpuTypes({ gpu_types: types }) {
  const kinds = [...new Set(types)];
  return kinds.length < 2 ? [] : kinds.map((kind) => `${types.filter((type) => type === kind).length} × ${kind}`);
}

/** Which steps had no finite loss or gradient; null: none. */
function oddSteps({ not_finite_from: since, steps_skipped: skipped }) {
  const parts = [since !== null && `no finite loss or gradient since step ${count(since)}`, skipped > 0 && `${countOf(skipped, "step")} skipped`];
  const text = parts.filter(Boolean).join(", ");
  return text ? h("span", { class: since === null ? "" : "wrong" }, text) : null;
}

/** What of the step time lies between steps, and what was predicted for the rest. */
function stepParts({ step_s: step, between_s: between }, predicted) {
  const told = step && between / step >= 0.02;
  const off = step && predicted ? ` (${signedPercent((step - between) / predicted - 1)})` : "";
  return [told && `${seconds(between)} between steps`, predicted && `predicted${told ? " for the rest" : ""} ${seconds(predicted)}${off}`].filter(Boolean).join("; ") || null;
}
