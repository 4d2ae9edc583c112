// How bad an event is, by its kind: "bad", "warn", "good" or null.
const BAD = new Set(["vm_lost", "job_failed", "worker_exited", "hang", "setup_failed", "loss_not_finite", "profile_rejected", "provider_refused",
  "webhook_failed", "checkpoint_passed_over"]);
const WARN = new Set(["vm_suspect", "vm_slow", "vm_quarantined", "vm_draining", "vm_cordoned", "vm_revoked", "preemption_notice", "job_preempted",
  "job_cancelling", "job_cancelled", "hang_suspected", "out_of_memory", "reshape_not_possible", "copies_not_kept", "cost_unknown"]);
const GOOD = new Set(["job_succeeded", "loss_finite_again", "vm_well"]);
const FAULTS = new Set(["script_failed", "worker_failed", "hang"]); // ends of generations that count against the job

export function severity({ kind, data }) {
  if (kind === "generation_ended" && FAULTS.has(data?.cause)) return "bad";
  if (kind === "job_succeeded" && data?.note) return "warn"; // but
  return BAD.has(kind) ? "bad" : WARN.has(kind) ? "warn" : GOOD.has(kind) ? "good" : null;
}
