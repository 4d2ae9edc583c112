// The dialog that submits a job: YAML, checked by the manager while it is typed, with the plan that it would get now.
import { send } from "./api.js";
import { ask } from "./dialogs.js";
import { h, put } from "./dom.js";
import { count, money, number, seconds, shape } from "./format.js";
import { findSetting, loadSchema, pathAt, writeJob } from "./job_text.js";

const CHECK_MS = 350;
const TEMPLATE = `name: my-job
workdir: /path/on/every/vm
run: python train.py
global_batch: 64      # examples per step, whatever number of GPUs there is
resources:
  min_gpus: 1
`;

/** Resolves with the job, or null. `from`: a job whose settings the dialog begins with. */
export async function submit(from = null) {
  const schema = loadSchema();
  const text = h("textarea", { id: "document", spellcheck: "false", required: true, "aria-describedby": "document-note document-check" });
  text.value = from ? writeJob({ ...from.spec, name: nextName(from.name) }, await schema.catch(() => null)) : TEMPLATE;
  const hint = h("p", { class: "note setting", id: "document-hint" });
  const check = h("div", { class: "check", id: "document-check", role: "status" });
  const key = crypto.randomUUID?.() ?? String(Math.random()); // pressed twice, it is one job
  let timer = null;
  let asked = 0; // the number of the newest check: an older answer is not shown

  async function tryJob() {
    const mine = ++asked;
    put(check, h("p", { class: "note" }, "Checking…"));
    const found = await send("POST", "jobs/dry-run", { text: text.value });
    if (mine === asked) put(check, found.problems.length ? problemList(found.problems, text) : dryRun(found));
    return found;
  }
  async function checkNow() {
    try {
      await tryJob();
    } catch (error) {
      put(check, h("p", { class: "wrong" }, `Not checked: ${error.message}`));
    }
  }
  async function showHint() {
    const path = pathAt(text.value, text.selectionStart);
    const found = path && findSetting(await schema.catch(() => null), path);
    put(hint, found ? [h("code", {}, path.join(".")), ": ", found] : "");
  }
  text.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(checkNow, CHECK_MS); });
  for (const event of ["keyup", "click", "focus"]) text.addEventListener(event, showHint);
  checkNow();
  const made = await ask(from ? `Clone ${from.name}` : "Submit a job", [
    h("label", { for: "document" }, "Job document (YAML or JSON)"), text, hint, check,
    h("p", { class: "note", id: "document-note" }, from?.spec.archive ? "The clone runs in the same copy of the folder; another one is sent by " : "The workdir is a path that exists on every VM; a folder is sent along by ",
      h("code", {}, "varuna submit job.yaml"), "."),
  ], "Submit", async () => {
    clearTimeout(timer);
    const { problems, document: document_ } = await tryJob();
    if (problems.length) throw new Error(`line ${problems[0].line}: ${describe(problems[0])}`);
    return send("POST", "jobs", document_, { "Idempotency-Key": key });
  }, { wide: true });
  clearTimeout(timer);
  return made;
}

/** The dialog for a new job, or for a clone of `from`; then the page of the job. */
export async function submitAndShow(from = null) {
  const job = await submit(from);
  if (job) location.hash = `#/jobs/${job.id}`;
}

const describe = ({ field, text }) => (field ? `${field}: ${text}` : text);

/** Each problem leads to its line. */
function problemList(problems, area) {
  return h("ul", { class: "problems" }, problems.map((problem) => h("li", {},
    h("button", { type: "button", class: "plain", on: { click: () => selectLine(area, problem.line) } }, `line ${problem.line}`), " ", describe(problem))));
}

function selectLine(area, line) {
  const before = area.value.split("\n").slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
  const end = area.value.indexOf("\n", before);
  area.focus();
  area.setSelectionRange(before, end < 0 ? area.value.length : end);
}

function dryRun(found) {
  const { plan } = found;
  return [h("p", {}, h("span", { class: "state good" }, h("span", { "aria-hidden": "true" }, "✔"), "valid"), " ",
    `${count(found.free_gpus)} of ${count(found.all_gpus)} GPUs are free.`),
  plan ? h("p", {}, h("b", {}, shape(plan.p, plan.d)), ` with micro-batch ${plan.micro_batch}: ${number(plan.examples_per_s)} examples/s, ${seconds(plan.predicted_minibatch_s)} per step`,
    found.cost_per_hour === null ? "." : `, ${money(found.cost_per_hour)} per hour.`) : null,
  h("p", { class: "note" }, found.reason)];
}

/** "gpt" becomes "gpt-2", "gpt-2" becomes "gpt-3". */
function nextName(name) {
  const [, stem, digits] = /^(.*?)(?:-(\d+))?$/.exec(name);
  return `${stem}-${digits ? Number(digits) + 1 : 2}`;
}
