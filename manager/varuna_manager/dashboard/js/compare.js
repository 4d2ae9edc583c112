// Several jobs in the same charts, by step or by the time since their first.
import { get, getPage } from "./api.js";
import { card, h, jobLink, jobLoss, jobState, link, table } from "./dom.js";
import { count, number, seconds, shape } from "./format.js";
import { metricCharts } from "./metric_charts.js";
import { requests } from "./panels.js";
import { Series } from "./series.js";
import { atMostEvery } from "./turns.js";

const OVER = ["succeeded", "failed", "cancelled"];

export const compareLink = (ids) => `#/compare/${ids.map(encodeURIComponent).join(",")}`;

export function comparePage({ root, signal, argument, title }) {
  title("Compare jobs");
  const runs = argument.split(",").map((id) => ({ id, name: id, series: new Series(id), generations: [], job: null }));
  const charts = metricCharts(signal);
  const list = table("Compared jobs", [{ title: "Job", head: true, kind: "nowrap" }, { title: "State", kind: "nowrap" }, { title: "P×D", kind: "nowrap" }, { title: "Step", kind: "num" },
    { title: "Loss", kind: "num" }, { title: "Examples/s", kind: "num" }, { title: "Step time", kind: "num" }, { title: "Command", kind: "wide" }]);
  const jobs = card("Compared jobs", [], list.element);
  root.append(h("div", { class: "head" }, h("h1", {}, "Compare jobs"), h("span", { class: "crumb" }, link("#/jobs", "all jobs"))), jobs, charts.element);

  const refreshJobs = requests(jobs, async () => {
    const found = await Promise.all(runs.map((run) => get(`jobs/${encodeURIComponent(run.id)}`, signal)));
    found.forEach((job, index) => { runs[index].job = job; runs[index].name = job.name; });
    if (new Set(runs.map((run) => run.name)).size < runs.length) runs.forEach((run) => { run.name = `${run.job.name} (${run.job.id})`; });
    list.fill(found.map((job) => [jobLink(job.id, job.name), jobState(job), shape(job.plan?.p, job.plan?.d), count(job.step), jobLoss(job),
      number(job.examples_per_s), seconds(job.step_s), h("code", {}, job.spec.run)]));
  }, signal);
  const refreshCharts = requests(charts.element, async () => {
    await Promise.all(runs.map(async (run) => {
      run.generations = (await getPage(`jobs/${encodeURIComponent(run.id)}/generations?brief=true&order=desc&limit=200`, signal)).items.reverse();
      await run.series.update(run.generations, signal);
    }));
    charts.draw(runs);
  }, signal);
  const refresh = async () => { await refreshJobs(); await refreshCharts(); };
  const soon = atMostEvery(4000, () => (document.hidden ? null : refresh()));
  signal.addEventListener("abort", soon.stop);
  refresh();
  return { refresh, onProgress: (progress) => { if (runs.some((run) => run.job?.id === progress.job_id && !OVER.includes(run.job.state))) soon(); } };
}
