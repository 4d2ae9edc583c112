// What changes something: asks first, says what came of it.
import { get, send } from "./api.js";
import { ask } from "./dialogs.js";
import { h } from "./dom.js";
import { submitAndShow } from "./submit.js";

const button = (text, kind, click) => h("button", { type: "button", class: kind, on: { click } }, text);

/** Those that a job in this state has, for who may. `now` gives the job as it is when they are used. */
export function jobActions({ state }, now, may, changed) {
  if (!may("user")) return [];
  const clone = button("Clone…", null, () => submitAndShow(now()));
  if (state === "failed" || state === "cancelled") return [clone, button("Retry…", null, () => retry(now()).then(changed))];
  if (state === "queued" || state === "running") return [clone, button("Cancel…", "danger", () => cancel(now()).then(changed))];
  return [clone];
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

/** For a VM in this state. `now` gives the VM as it is when the button is used. */
export function drainButton({ state }, now, may, changed) {
  if (!may("admin") || ["draining", "lost", "gone"].includes(state)) return null;
  return button("Drain…", null, () => drain(now()).then(changed));
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

/** The fleet's wanted size. */
export async function resize(changed) {
  const fleet = await get("fleet");
  const input = h("input", { type: "number", id: "target", min: "0", step: "1", required: true, value: fleet.target });
  await ask("How many VMs?", [
    h("label", { for: "target" }, `VMs wanted from ${fleet.provider}`), input,
    fleet.max_vms !== null ? h("p", { class: "note" }, `Now the jobs' wants move it between ${fleet.min_vms} and ${fleet.max_vms}. A number that is set here is kept whatever they want, until the manager is started again with --max-vms.`) : null,
  ], "Set", () => send("PUT", "fleet", { target: Number(input.value) }));
  changed();
}
