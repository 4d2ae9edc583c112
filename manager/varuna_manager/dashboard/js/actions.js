// What changes something: asks first, says what came of it.
import { get, send } from "./api.js";
import { h, put } from "./dom.js";

/** A dialog with a form; `act` is awaited, and what it throws is shown. Resolves with its result, or null. */
export function ask(title, content, verb, act, { danger = false } = {}) {
  const problem = h("p", { class: "wrong", role: "alert" });
  const go = h("button", { type: "submit", class: danger ? "danger" : "main" }, verb);
  const back = h("button", { type: "button", on: { click: () => dialog.close() } }, danger ? "Keep it" : "Back");
  let result = null;
  const form = h("form", { on: { submit: async (event) => {
    event.preventDefault();
    go.disabled = true;
    put(problem);
    try {
      result = await act(form);
      dialog.close();
    } catch (error) {
      const fields = (error.errors ?? []).map(({ field, text }) => h("span", {}, h("br"), field ? `${field}: ` : "", text));
      put(problem, error.message, fields);
    } finally {
      go.disabled = false;
    }
  } } }, h("h2", { id: "dialog-title" }, title), content, problem, h("div", { class: "buttons" }, back, go));
  const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => { dialog.remove(); resolve(result); }, { once: true });
  });
}

const button = (text, kind, click) => h("button", { type: "button", class: kind, on: { click } }, text);

/** Those that a job in this state has, for who may. `now` gives the job as it is when they are used. */
export function jobActions({ state }, now, may, changed) {
  if (!may("user")) return [];
  if (state === "failed" || state === "cancelled") return [button("Retry…", null, () => retry(now()).then(changed))];
  if (state === "queued" || state === "running") return [button("Cancel…", "danger", () => cancel(now()).then(changed))];
  return [];
}

function cancel(job) {
  const save = h("input", { type: "checkbox", name: "save", id: "save", checked: true });
  return ask(`Cancel ${job.name}?`, [
    h("p", {}, `Its workers end, and its GPUs go to other jobs. It is at step ${job.step} and can be retried from its newest checkpoint.`),
    h("div", { class: "controls" }, save, h("label", { for: "save" }, "Finish the step and save a last checkpoint first")),
  ], "Cancel the job", () => send("POST", `jobs/${job.id}/cancel`, { save: save.checked }), { danger: true });
}

function retry(job) {
  return ask(`Retry ${job.name}?`, h("p", {}, "It goes on from its newest checkpoint, as the same job."), "Retry",
    () => send("POST", `jobs/${job.id}/retry`));
}

export function drainButton(vm, may, changed) {
  if (!may("admin") || ["draining", "lost", "gone"].includes(vm.state)) return null;
  return button("Drain…", null, () => drain(vm).then(changed));
}

/** Cordons a VM, or lifts its cordon. */
export function cordonButton(vm, may, changed) {
  if (!may("admin") || vm.state === "gone") return null;
  if (vm.cordoned_at) return vm.state === "draining" ? null : button("Uncordon…", null, () => uncordon(vm).then(changed));
  return vm.state === "draining" ? null : button("Cordon…", null, () => cordon(vm).then(changed));
}

function cordon(vm) {
  return ask(`Cordon ${vm.id}?`, h("p", {}, "No new workers start there until you uncordon it, even after it restarts. Running workers go on."),
    "Cordon the VM", () => send("POST", `vms/${encodeURIComponent(vm.id)}/cordon`));
}

function uncordon(vm) {
  return ask(`Uncordon ${vm.id}?`, h("p", {}, "Jobs may use it again."), "Uncordon the VM",
    () => send("POST", `vms/${encodeURIComponent(vm.id)}/uncordon`));
}

function drain(vm) {
  return ask(`Drain ${vm.id}?`, h("p", {}, vm.workers.length
    ? "Its workers leave after a checkpoint, and their job morphs away from it. Then the VM is given back."
    : "Nothing runs there. The VM is given back."),
  "Drain the VM", () => send("POST", `vms/${encodeURIComponent(vm.id)}/drain`, {}), { danger: true });
}

const TEMPLATE = {
  name: "my-job", workdir: "/path/on/every/vm", run: "python train.py", global_batch: 64,
  resources: { min_gpus: 1, max_gpus: null }, checkpoint: { url: null }, env: {}, priority: 0,
};

/** Paste a job document; resolves with the job. */
export async function submit() {
  const text = h("textarea", { id: "document", spellcheck: "false", required: true, "aria-describedby": "document-note" });
  text.value = JSON.stringify(TEMPLATE, null, 2);
  const key = crypto.randomUUID?.() ?? String(Math.random()); // pressed twice, it is one job
  return ask("Submit a job", [
    h("label", { for: "document" }, "Job document (JSON)"), text,
    h("p", { class: "note", id: "document-note" }, "The workdir is a path that exists on every VM. To upload a folder, use ",
      h("code", {}, "varuna submit job.yaml"), "."),
  ], "Submit", async () => {
    let document_;
    try {
      document_ = JSON.parse(text.value);
    } catch (error) {
      throw new Error(`This is not JSON: ${error.message}`);
    }
    return send("POST", "jobs", document_, { "Idempotency-Key": key });
  });
}

/** The fleet's wanted size. */
export async function resize(changed) {
  const fleet = await get("fleet");
  const input = h("input", { type: "number", id: "target", min: "0", step: "1", required: true, value: fleet.target });
  await ask("How many VMs?", [
    h("label", { for: "target" }, `VMs wanted from ${fleet.provider}`), input,
    fleet.max_vms !== null ? h("p", { class: "note" }, `The jobs' wants move it between ${fleet.min_vms} and ${fleet.max_vms}.`) : null,
  ], "Set", () => send("PUT", "fleet", { target: Number(input.value) }));
  changed();
}
