"""The agent's decisions: events in, instructions out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agent_vm import LEASE_S, PORT, Vm, exits, key, launch, of, sent
from varuna_agent.state import IllegalPhaseChangeError, Timings
from varuna_agent.state import events as ev
from varuna_agent.state import instructions as ins
from varuna_agent.state.hosted_worker import WorkerPhase, WorkerStimulus
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import worker_pb2 as w


def stop(generation: int = 1, mode: pb.StopMode.ValueType = pb.STOP_MODE_LEAVE_NOW, grace_s: float = 5) -> pb.Stop:
    return pb.Stop(job_id="job", generation=generation, mode=mode, grace_s=grace_s)


# ---------------------------------------------------------------- launches


def test_a_launch_starts_its_workers() -> None:
    vm = Vm()
    started = of(ins.StartWorker, vm.receive_message(launch=launch(ranks=[5, 3])))
    assert [start.key.rank for start in started] == [5, 3]
    environment, plan = started[0].environment, started[0].environment.plan
    assert (environment.rank, environment.local_rank, environment.world_size) == (5, 0, 8)
    assert (plan.p, plan.d, plan.stage_starts, plan.recompute) == (2, 4, (0, 3), (1, 0))
    assert (environment.device, plan.policy, environment.mode) == ("cuda:0", "work-conserving", "train")
    assert [start.rendezvous_port for start in started] == [0, 0]


def test_a_repeated_launch_changes_nothing_even_after_its_workers_have_gone() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    assert vm.receive_message(launch=launch()) == []
    vm.ended(key(), 0)
    assert vm.receive_message(launch=launch()) == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (launch(generation=1), "generation 1 is over: VM vm-1 has seen generation 2"),
        (launch(generation=0), "generation 0 is over"),
        (launch(generation=3, job_id="../x"), "job id '../x'"),
        (launch(generation=3, kind=pb.GENERATION_KIND_UNSPECIFIED), "generation kind 0"),
        (launch(generation=3, world_size=7), "plan 2×4 does not have the world size 7"),
        (launch(generation=3, ranks=[1, 1]), "only once"),
        (launch(generation=3, ranks=[8]), "do not fit into a world of 8"),
        (launch(generation=3, workers=[pb.WorkerAssignment(rank=1, local_rank=4)]), "VM vm-1 has 4"),
        (launch(generation=1, job_id="other"), "device 0 is in use by job/g2/rank1"),
    ],
)
def test_what_cannot_be_followed_is_refused_and_disturbs_nothing(command: pb.Launch, words: str) -> None:
    vm = Vm()
    vm.receive_message(launch=launch(generation=2))
    before = vm.phases()
    (refusal,) = sent(vm.receive_message(launch=command), "command_refused")
    assert (refusal.job_id, refusal.generation) == (command.job_id, command.generation)
    assert words in refusal.reason
    assert vm.phases() == before


def test_a_generation_that_was_stopped_before_its_launch_does_not_start() -> None:
    vm = Vm()
    vm.receive_message(stop=stop(generation=3))
    (refusal,) = sent(vm.receive_message(launch=launch(generation=3)), "command_refused")
    assert "generation 3 is over" in refusal.reason


def test_a_newer_generation_starts_when_the_older_ones_workers_are_gone() -> None:
    vm = Vm()
    vm.receive_message(launch=launch(1, ranks=[1, 2]))
    vm.ready(key(1, 1))
    instructions = vm.receive_message(launch=launch(2, ranks=[4]))
    assert [leave.key for leave in of(ins.SendLeave, instructions)] == [key(1, 1)]
    assert [kill.key for kill in of(ins.KillWorker, instructions)] == [key(1, 2)]  # it had never connected
    assert of(ins.StartWorker, instructions) == []
    assert of(ins.StartWorker, vm.ended(key(1, 1), 75)) == []
    assert [start.key for start in of(ins.StartWorker, vm.ended(key(1, 2), -9))] == [key(2, 4)]


def test_on_the_cpu_a_newer_generation_starts_beside_the_end_of_the_older() -> None:
    vm = Vm(device="cpu")
    vm.receive_message(launch=launch(1, ranks=[1, 2]))
    vm.ready(key(1, 1))
    instructions = vm.receive_message(launch=launch(2, ranks=[4]))
    assert [leave.key for leave in of(ins.SendLeave, instructions)] == [key(1, 1)]
    assert [start.key for start in of(ins.StartWorker, instructions)] == [key(2, 4)]
    assert exits(vm.ended(key(1, 1), 75)) == [(1, 1, "GENERATION_ENDED")]
    assert of(ins.StartWorker, vm.instructions) == [
        *of(ins.StartWorker, vm.instructions)[:2],
        *of(ins.StartWorker, instructions),
    ], "once"


def test_on_the_cpu_another_job_waits_for_a_worker_that_saves() -> None:
    vm = Vm(device="cpu")
    vm.receive_message(launch=launch(1))
    vm.ready(key(1))
    vm.receive_message(stop=stop(1, mode=pb.STOP_MODE_SAVE_FIRST))
    assert of(ins.StartWorker, vm.receive_message(launch=launch(1, job_id="other"))) == []
    assert [start.key.job_id for start in of(ins.StartWorker, vm.ended(key(1), 75))] == ["other"]


def test_what_was_seen_is_remembered_before_anything_is_done_about_it() -> None:
    vm = Vm(seen={"job": 2, "old": 7})
    assert "generation 2 is over" in sent(vm.receive_message(launch=launch(2)), "command_refused")[0].reason
    instructions = vm.receive_message(launch=launch(3))
    assert isinstance(instructions[0], ins.SaveSeenGenerations)
    assert list(instructions[0].seen.items()) == [("old", 7), ("job", 3)]
    assert of(ins.SaveSeenGenerations, vm.receive_message(stop=stop(3))) == [], "nothing new"
    assert of(ins.SaveSeenGenerations, vm.receive_message(stop=stop(5))) == [
        ins.SaveSeenGenerations({"old": 7, "job": 5})
    ]


def test_only_so_many_jobs_are_remembered() -> None:
    vm = Vm(seen={f"j{number}": 1 for number in range(1000)})
    (remember,) = of(ins.SaveSeenGenerations, vm.receive_message(stop=pb.Stop(job_id="new", generation=1)))
    assert (len(remember.seen), "j0" in remember.seen, "new" in remember.seen) == (1000, False, True)


def test_stacks_are_asked_of_each_worker_of_the_generation_that_has_a_process() -> None:
    vm = Vm()
    vm.receive_message(launch=launch(1, ranks=[1, 2], job_id="other"))
    vm.handle(ev.WorkerConnected(key(1, 1, "other"), 77))
    vm.receive_message(stop=pb.Stop(job_id="other", generation=1, grace_s=9))
    vm.receive_message(launch=launch(1))  # waits for the device of the other job

    instructions = vm.receive_message(dump_stacks=pb.DumpStacks(job_id="other", generation=1, request_id="r"))
    assert instructions == [ins.ReadStacks("r", key(1, 1, "other"), 77), ins.ReadStacks("r", key(1, 2, "other"), 0)]
    (dump,) = sent(
        vm.receive_message(dump_stacks=pb.DumpStacks(job_id="job", generation=1, request_id="s")), "stack_dump"
    )
    assert (dump.request_id, dump.rank, "still in use" in dump.error) == ("s", 1, True)
    assert vm.receive_message(dump_stacks=pb.DumpStacks(job_id="job", generation=9, request_id="t")) == []


def prepare(vm: Vm, job_id: str, **changes: Any) -> list[str]:
    """The jobs whose folder the agent begins to make ready."""
    wish = pb.Prepare(job_id=job_id, archive="a", **changes)
    return [prepare.request.job_id for prepare in of(ins.PrepareJob, vm.receive_message(prepare=wish))]


def prepared(vm: Vm, job_id: str, error: str = "") -> list[str]:
    return [prepare.request.job_id for prepare in of(ins.PrepareJob, vm.handle(ev.PreparationEnded(job_id, error)))]


def last_beat(vm: Vm) -> Any:
    return sent(vm.instructions, "heartbeat")[-1]


def test_folders_are_made_ready_one_at_a_time_in_the_order_of_the_wishes() -> None:
    vm = Vm()
    assert prepare(vm, "a") == ["a"]
    assert prepare(vm, "b") == prepare(vm, "c") == prepare(vm, "a") == []
    assert list(last_beat(vm).setting_up_jobs) == ["a", "b", "c"]
    assert prepared(vm, "a") == ["b"]
    assert prepared(vm, "b", "no disk") == ["c"]
    assert [fact.error_text for fact in sent(vm.instructions, "setup_failed")] == ["no disk"]
    assert prepared(vm, "c") == []
    assert (list(last_beat(vm).prepared_jobs), list(last_beat(vm).setting_up_jobs)) == (["a", "c"], [])
    assert prepare(vm, "a") == ["a"], "for its imports: the folder is ready"
    assert list(last_beat(vm).prepared_jobs) == ["a", "c"], "it stays so meanwhile"


def test_what_the_manager_keeps_no_more_is_cancelled_and_forgotten() -> None:
    vm = Vm()
    for job_id in ("done", "under way", "waits", "stays"):
        prepare(vm, job_id)
    prepared(vm, "done")
    instructions = vm.receive_message(keep_prepared=pb.KeepPrepared(job_ids=["stays", "elsewhere"]))
    assert of(ins.CancelPreparation, instructions) == [ins.CancelPreparation("under way")]
    assert of(ins.KeepFolders, instructions) == [ins.KeepFolders(frozenset({"stays", "elsewhere"}))]
    assert (list(last_beat(vm).prepared_jobs), list(last_beat(vm).setting_up_jobs)) == ([], ["stays"])
    assert prepare(vm, "under way") == [], "the one before has to end first"
    assert prepared(vm, "under way", "cancelled") == ["stays"]
    assert sent(vm.instructions, "setup_failed") == [], "it was not the job's fault"
    assert prepared(vm, "stays") == ["under way"]


def test_a_cancelled_preparation_that_was_done_already_does_not_count() -> None:
    vm = Vm()
    prepare(vm, "a")
    vm.receive_message(keep_prepared=pb.KeepPrepared())
    prepared(vm, "a")
    assert list(last_beat(vm).prepared_jobs) == []


def test_heartbeats_do_not_grow_with_the_jobs_that_were_ever_prepared() -> None:
    vm = Vm()
    sizes = set()
    for number in range(100, 400):
        prepare(vm, f"job-{number}")
        prepared(vm, f"job-{number}")
        vm.receive_message(keep_prepared=pb.KeepPrepared(job_ids=[f"job-{number}"]))
        sizes.add(len(last_beat(vm).prepared_jobs))
    assert max(sizes) <= 2


def test_the_next_heartbeat_says_for_which_jobs_it_prepares() -> None:
    vm = Vm()
    wish = pb.Prepare(job_id="job", command="python train.py")
    assert vm.receive_message(prepare=wish) == [ins.PrepareJob(wish)]
    (heartbeat,) = sent(vm.handle(ev.WarmJobsChanged(frozenset({"job"}))), "heartbeat")
    assert (list(heartbeat.preparing_jobs), list(heartbeat.warm_jobs)) == (["job"], [])
    (heartbeat,) = sent(vm.handle(ev.WarmJobsChanged(frozenset(), frozenset({"job"}))), "heartbeat")
    assert (list(heartbeat.preparing_jobs), list(heartbeat.warm_jobs)) == ([], ["job"])
    vm.receive_message(drain=pb.Drain())
    assert of(ins.PrepareJob, vm.receive_message(prepare=wish)) == []


def test_a_waiting_generation_that_is_overtaken_is_reported_as_ended() -> None:
    vm = Vm()
    vm.receive_message(launch=launch(1))
    vm.ready(key(1))
    vm.receive_message(launch=launch(2, ranks=[0]))
    vm.handle(ev.RendezvousPortOpened(PORT + 1))
    instructions = vm.receive_message(launch=launch(3, ranks=[0], rendezvous_port=PORT + 1))
    assert exits(instructions) == [(2, 0, "GENERATION_ENDED")]
    assert of(ins.ReleaseRendezvousPort, instructions) == [ins.ReleaseRendezvousPort(PORT)]
    assert [s.rendezvous_port for s in of(ins.StartWorker, vm.ended(key(1), 75))] == [PORT + 1]


def test_a_waiting_generation_is_cancelled_as_a_whole() -> None:
    vm = Vm()
    vm.receive_message(launch=launch(1, job_id="other"))
    vm.handle(ev.WorkerConnected(key(1, job_id="other"), 7))
    vm.receive_message(stop=pb.Stop(job_id="other", generation=1, grace_s=9))
    vm.receive_message(
        launch=launch(1, ranks=[1, 2])
    )  # rank 1 waits for the device of the other job, rank 2 for rank 1
    assert of(ins.StartWorker, vm.receive_message(stop=stop(1))) == []
    assert vm.phases() == {key(1, job_id="other"): WorkerPhase.LEAVING}


def test_another_job_waits_for_a_device_that_is_about_to_be_free() -> None:
    vm = Vm()
    vm.receive_message(launch=launch(1))
    vm.ready(key(1))
    vm.receive_message(stop=stop(1))
    assert of(ins.StartWorker, vm.receive_message(launch=launch(1, job_id="other"))) == []
    assert [start.key.job_id for start in of(ins.StartWorker, vm.ended(key(1), 75))] == ["other"]


def test_rank_0_claims_the_held_port_and_the_next_one_is_told_at_once() -> None:
    vm = Vm()
    instructions = vm.receive_message(launch=launch(1, ranks=[0]))
    assert of(ins.ClaimRendezvousPort, instructions) == [ins.ClaimRendezvousPort(PORT)]
    assert of(ins.StartWorker, instructions)[0].rendezvous_port == PORT
    (heartbeat,) = sent(vm.handle(ev.RendezvousPortOpened(PORT + 1)), "heartbeat")
    assert heartbeat.rendezvous_port == PORT + 1


def test_a_stale_rendezvous_port_fails_the_launch() -> None:
    vm = Vm()
    vm.receive_message(launch=launch(1, ranks=[0, 1]))
    instructions = vm.receive_message(
        launch=launch(
            1,
            ranks=[0, 1],
            job_id="other",
            workers=[pb.WorkerAssignment(rank=0, local_rank=2), pb.WorkerAssignment(rank=1, local_rank=3)],
        )
    )  # the port is spoken for
    assert exits(instructions) == [(1, 0, "LAUNCH_REFUSED"), (1, 1, "LAUNCH_REFUSED")]
    assert "rendezvous port stale" in sent(instructions, "worker_exited")[0].error_text


# ---------------------------------------------------------------- stopping


def test_a_stop_is_passed_on_and_enforced_after_its_grace() -> None:
    vm = Vm(timings=Timings(silence_s=1000.0))
    vm.receive_message(launch=launch())
    vm.ready(key())
    (leave,) = of(ins.SendLeave, vm.receive_message(stop=stop(mode=pb.STOP_MODE_SAVE_FIRST, grace_s=30)))
    assert leave.mode == pb.STOP_MODE_SAVE_FIRST
    assert of(ins.KillWorker, vm.tick(at=129.9)) == []
    (kill,) = of(ins.KillWorker, vm.tick(at=130.0))
    assert "had not left after 30 s" in kill.reason
    vm.ended(key(), -9)
    assert exits(vm.instructions) == [(1, 1, "KILLED")]


def test_a_second_stop_can_only_hurry() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    vm.receive_message(stop=stop(mode=pb.STOP_MODE_SAVE_FIRST, grace_s=30))
    (leave,) = of(ins.SendLeave, vm.receive_message(stop=stop(grace_s=5)))
    assert leave.mode == pb.STOP_MODE_LEAVE_NOW
    assert vm.receive_message(stop=stop(mode=pb.STOP_MODE_SAVE_FIRST, grace_s=300)) == []
    assert len(of(ins.KillWorker, vm.tick(at=105.0))) == 1


def test_leaving_now_kills_what_never_connected_and_saving_first_waits_for_it() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    assert vm.receive_message(stop=stop(mode=pb.STOP_MODE_SAVE_FIRST)) == []
    (leave,) = of(ins.SendLeave, vm.handle(ev.WorkerConnected(key(), 7)))
    assert leave.mode == pb.STOP_MODE_SAVE_FIRST

    vm = Vm()
    vm.receive_message(launch=launch())
    assert len(of(ins.KillWorker, vm.receive_message(stop=stop()))) == 1
    assert vm.receive_message(stop=stop()) == []


def test_a_stop_of_another_generation_leaves_newer_workers_alone() -> None:
    vm = Vm()
    vm.receive_message(launch=launch(2))
    vm.ready(key(2))
    instructions = vm.receive_message(stop=stop(1))
    assert vm.phases() == {key(2): WorkerPhase.READY}
    assert [type(instruction) for instruction in instructions] == [ins.SendMessage]


def test_a_stop_of_what_never_arrived_is_answered() -> None:
    """The Launch was lost on the way: the manager would wait for ever for the ends of workers that never started."""
    vm = Vm()
    vm.connect()
    (refused,) = sent(vm.receive_message(stop=stop(3)), "command_refused")
    assert (refused.job_id, refused.generation) == ("job", 3)
    assert refused.reason == "generation 3 was stopped, and nothing of it runs on VM vm-1"
    assert vm.receive_message(launch=launch(3)) != []
    assert vm.phases() == {}


# ---------------------------------------------------------------- exits


@pytest.mark.parametrize(
    ("code", "cause", "reported"),
    [
        (0, "FINISHED", 0),
        (75, "GENERATION_ENDED", 75),
        (76, "PEER_LOST", 76),
        (1, "SCRIPT_FAILED", 1),
        (127, "SCRIPT_FAILED", 127),
        (-9, "KILLED", -9),
        (137, "KILLED", -9),
        (139, "KILLED", -11),
        (255, "SCRIPT_FAILED", 255),
    ],
)
def test_what_an_exit_means(code: int, cause: str, reported: int) -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    instructions = vm.ended(key(), code, "last line")
    assert exits(instructions) == [(1, 1, cause)]
    (exited,) = sent(instructions, "worker_exited")
    assert exited.exit_code == reported
    assert ("last line" in exited.error_text) == (cause in ("SCRIPT_FAILED", "PEER_LOST", "KILLED"))


@pytest.mark.parametrize(
    ("log", "text"),
    [
        (
            "step 19 loss 0.31\nstep 20 loss 0.309\n",
            "Last lines of its log:\nstep 19 loss 0.31\nstep 20 loss 0.309\nexit code 3, last line: step 20 loss 0.309",
        ),
        ("Traceback (most recent call last):\nKeyError: 'x'", "Traceback (most recent call last):\nKeyError: 'x'"),
        ("", "exit code 3; its log is empty"),
    ],
)
def test_the_last_line_of_a_log_is_a_cause_only_after_a_traceback(log: str, text: str) -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    (exited,) = sent(vm.ended(key(), 3, log), "worker_exited")
    assert exited.error_text == text


def test_a_command_that_the_shell_cannot_run_is_a_failed_launch() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    assert exits(vm.ended(key(), 127, "sh: no: not found")) == [(1, 1, "LAUNCH_FAILED")]


def test_the_traceback_comes_before_the_log() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    vm.receive_worker_message(key(), failure=w.WorkerFailure(traceback="Traceback: x"))
    vm.receive_message(stop=stop())  # too late to be the reason
    (exited,) = sent(vm.ended(key(), 1, "noise"), "worker_exited")
    assert (exited.cause, exited.error_text) == (pb.EXIT_CAUSE_SCRIPT_FAILED, "Traceback: x")


def test_a_device_without_memory_is_a_cause_of_its_own_with_its_figures() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    short = pb.MemoryShortage(asked_bytes=3, free_bytes=1, limit_bytes=16, peak_bytes=12)
    vm.receive_worker_message(key(), failure=w.WorkerFailure(traceback="OutOfMemoryError: x", shortage=short))
    (exited,) = sent(vm.ended(key(), 1, "noise"), "worker_exited")
    assert (exited.cause, exited.error_text) == (pb.EXIT_CAUSE_OUT_OF_MEMORY, "OutOfMemoryError: x")
    assert exited.shortage == short


def test_the_kernels_kill_for_want_of_memory_is_the_line_that_is_shown() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    line = "The kernel killed a process of the job: together they reached its memory limit of 1.0 GiB"
    (exited,) = sent(vm.ended(key(), -9, f"loading\n{line}"), "worker_exited")
    assert (exited.cause, exited.error_text.splitlines()[-1]) == (pb.EXIT_CAUSE_KILLED, line)


def test_an_untidy_end_after_being_told_to_leave_is_not_the_scripts_fault() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    vm.receive_message(stop=stop())
    vm.receive_worker_message(key(), failure=w.WorkerFailure(traceback="Traceback: pipeline was left"))
    assert exits(vm.ended(key(), 1)) == [(1, 1, "GENERATION_ENDED")]


def test_words_of_a_worker_that_is_gone_are_dropped() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ended(key(), 0)
    assert vm.step(key(), 1) == []
    assert vm.handle(ev.WorkerDisconnected(key())) == []
    assert not vm.state.is_expected(key())


def test_an_impossible_event_raises_with_the_workers_story() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    with pytest.raises(IllegalPhaseChangeError, match=r"job/g1/rank1 is ready: no cancel .*hello at 100"):
        vm.state.workers[0].apply_stimulus(WorkerStimulus.CANCEL, vm.now)


# ---------------------------------------------------------------- reports and heartbeats


def test_steps_go_out_at_once_for_the_first_then_with_each_heartbeat_and_before_an_exit() -> None:
    vm = Vm()
    vm.receive_message(launch=launch(ranks=[1, 2]))
    for rank in (1, 2):
        vm.ready(key(rank=rank), resumed_step=6)
    assert [[s.step for s in f.steps] for f in sent(vm.step(key(), 7), "steps_completed")] == [[7]]
    assert vm.step(key(), 8) == vm.step(key(), 9) == vm.step(key(rank=2), 9) == []
    instructions = vm.tick(at=101.0)
    assert [[s.step for s in f.steps] for f in sent(instructions, "steps_completed")] == [[8, 9]]
    assert [(h.rank, h.step, h.forward_us) for h in sent(instructions, "heartbeat")[0].workers] == [
        (1, 9, 5),
        (2, 9, 5),
    ]
    vm.step(key(), 10)
    instructions = vm.ended(key(), 0)
    assert [m.message.report.WhichOneof("fact") for m in of(ins.SendMessage, instructions)] == [
        "steps_completed",
        "worker_exited",
    ]


def test_a_step_that_updated_nothing_goes_out_as_such() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    vm.step(key(), 1)
    vm.receive_worker_message(key(), step_done=w.StepDone(step=2, loss=1.0, skipped=True))
    (completed,) = sent(vm.tick(at=101.0), "steps_completed")
    assert [(step.step, step.skipped) for step in completed.steps] == [(2, True)]


def test_what_a_script_logs_is_reported_with_the_rank_that_logged_it() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    values = {"accuracy": 0.5, "nan": math.nan, "inf": math.inf, "": 1.0, "long" * 50: 1.0}
    vm.receive_worker_message(key(), log_values=w.LogValues(step=7, values=values))
    (logged,) = sent(vm.tick(at=101.0), "values_logged")
    assert (logged.job_id, logged.generation) == key().generation_key
    assert [(one.name, one.step, one.value, one.rank) for one in logged.values] == [("accuracy", 7, 0.5, key().rank)]


def test_heartbeats_count_what_a_worker_evaluates_between_steps() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    vm.step(key(), 1)
    assert vm.receive_worker_message(key(), evaluated=w.Evaluated(micro_batches=40)) == []
    (health,) = sent(vm.tick(at=101.0), "heartbeat")[0].workers
    assert (health.step, health.evaluated) == (1, 40)


def test_heartbeats_carry_what_a_worker_waits_for() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    for at, kind in ((101.0, pb.WAIT_KIND_STEP), (102.0, pb.WAIT_KIND_UNSPECIFIED)):
        assert vm.receive_worker_message(key(), waiting=w.Waiting(waiting_for=kind)) == []
        (health,) = sent(vm.tick(at=at), "heartbeat")[0].workers
        assert health.waiting_for == kind


def test_a_rank_that_does_not_answer_is_reported_before_the_next_heartbeat_is_due() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    assert len(sent(vm.tick(at=101.0), "heartbeat")) == 1
    quiet = w.Waiting(waiting_for=pb.WAIT_KIND_STEP, quiet_ranks=[3])
    vm.tick(at=101.1)
    vm.receive_worker_message(key(), waiting=quiet)
    assert sent(vm.tick(at=101.2), "heartbeat") == [], "a worker cannot make its agent send without end"
    assert vm.state.next_deadline() == pytest.approx(101.25)
    (health,) = sent(vm.tick(at=101.25), "heartbeat")[0].workers
    assert list(health.quiet_ranks) == [3]
    vm.tick(at=102.0)
    vm.receive_worker_message(key(), waiting=quiet)
    assert sent(vm.tick(at=102.0), "heartbeat") == [], "it is no news"
    vm.receive_worker_message(key(), waiting=w.Waiting())
    (health,) = sent(vm.tick(at=102.0), "heartbeat")[0].workers
    assert list(health.quiet_ranks) == []


def test_steps_go_out_before_the_checkpoint_that_holds_them() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    vm.step(key(), 1)
    assert vm.step(key(), 2) == vm.step(key(), 3) == []
    instructions = vm.receive_worker_message(key(), checkpoint_done=w.CheckpointDone(step=3))
    facts = [m.message.report.WhichOneof("fact") for m in of(ins.SendMessage, instructions)]
    assert facts == ["steps_completed", "checkpoint_committed"]
    assert [[s.step for s in f.steps] for f in sent(instructions, "steps_completed")] == [[2, 3]]


def test_reports_wait_for_the_manager_and_come_in_order() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.handle(ev.StreamClosed("gone"))
    assert vm.ready(key()) == []
    assert vm.step(key(), 1) == vm.step(key(), 2) == []
    assert vm.receive_worker_message(key(), checkpoint_done=w.CheckpointDone(step=2)) == []
    vm.handle(ev.StreamOpened())
    (hello,) = sent(vm.instructions, "hello")[-1:]
    assert [(r.generation, r.rank, r.step) for r in hello.workers] == [(1, 1, 2)]
    assert [(s.job_id, s.generation) for s in hello.seen_generations] == [("job", 1)]
    assert hello.first_report == 1
    instructions = vm.receive_message(welcome=pb.Welcome(lease_s=LEASE_S))
    facts = [m.message.report.WhichOneof("fact") for m in of(ins.SendMessage, instructions)]
    assert facts == ["worker_started", "steps_completed", "checkpoint_committed", None]
    vm.receive_message(ack=pb.Ack(reports_through=2))
    assert [report.number for report in vm.state.unacknowledged] == [3]


def test_a_notice_is_reported_once() -> None:
    vm = Vm()
    (notice,) = sent(vm.handle(ev.NoticeReceived("n", 30.0, "file")), "preemption_notice")
    assert (notice.notice_id, notice.seconds_left) == ("n", 30.0)
    vm.now += 1
    assert vm.handle(ev.NoticeReceived("n", 29.0, "file")) == []


def test_a_notice_that_is_sent_late_says_what_is_left_of_it() -> None:
    vm = Vm(welcome=False)
    vm.handle(ev.NoticeReceived("n", 30.0, "file"))
    for later_s, left in ((14.0, 16.0), (10.0, 6.0), (60.0, 0.0)):
        vm.now += later_s
        (notice,) = sent(vm.connect(), "preemption_notice")
        assert notice.seconds_left == left
        vm.handle(ev.StreamClosed("the manager is away"))


def test_a_notice_whose_time_is_brought_forward_is_reported_again() -> None:
    vm = Vm()
    vm.handle(ev.NoticeReceived("n", 600.0, "slurm"))
    vm.now += 10
    (notice,) = sent(vm.handle(ev.NoticeReceived("n", 30.0, "slurm")), "preemption_notice")
    assert (notice.notice_id, notice.seconds_left) == ("n", 30.0)
    assert vm.handle(ev.NoticeReceived("n", 590.0, "slurm")) == [], "the first to come due counts"
    vm.now += 10
    assert {notice.seconds_left for notice in sent(vm.connect(), "preemption_notice")} == {20.0}


# ---------------------------------------------------------------- lease and silence


def test_the_lease_runs_from_the_sending_of_the_acknowledged_heartbeat() -> None:
    vm = Vm(timings=Timings(silence_s=1000.0))
    vm.receive_message(launch=launch())
    vm.ready(key())
    (heartbeat,) = sent(vm.tick(at=110.0), "heartbeat")
    vm.now = 114.0
    vm.receive_message(ack=pb.Ack(heartbeat_sequence=heartbeat.sequence))
    vm.handle(ev.StreamClosed("gone"))
    assert vm.state.next_deadline() == 110.0 + LEASE_S
    assert of(ins.KillWorker, vm.tick(at=169.9)) == []
    (kill,) = of(ins.KillWorker, vm.tick(at=170.0))
    assert "the lease is over" in kill.reason
    assert vm.state.next_deadline() is None  # nothing more to wait for but the process
    vm.ended(key(), -9)
    assert exits(vm.instructions) == []
    (exited,) = sent(vm.connect(), "worker_exited")
    assert exited.cause == pb.EXIT_CAUSE_LEASE_OVER
    assert "the lease is over" in exited.error_text


def test_a_lease_that_ran_out_while_the_vm_was_suspended_is_not_revived_by_a_welcome() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    vm.now = 500.0
    assert [kill.key for kill in of(ins.KillWorker, vm.handle(ev.StreamClosed("gone")))] == [key()]
    assert of(ins.KillWorker, vm.connect()) == []


def test_without_a_lease_nothing_is_launched() -> None:
    vm = Vm()
    vm.now = 160.0
    (refusal,) = sent(vm.receive_message(launch=launch()), "command_refused")
    assert "has no lease" in refusal.reason


def test_an_acknowledgement_of_nothing_renews_nothing() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    vm.now = 150.0
    vm.receive_message(ack=pb.Ack(reports_through=1))
    assert len(of(ins.KillWorker, vm.tick(at=160.0))) == 1


def test_a_silent_stream_is_given_up_once() -> None:
    vm = Vm()
    vm.handle(ev.StreamClosed("gone"))
    vm.handle(ev.StreamOpened())
    assert of(ins.HangUp, vm.tick(at=104.9)) == []
    assert len(of(ins.HangUp, vm.tick(at=105.0))) == 1
    assert of(ins.HangUp, vm.tick(at=106.0)) == []


def find_patience(vm: Vm) -> float:
    """Seconds until the agent gives up a stream that is opened now."""
    vm.handle(ev.StreamOpened())
    began = vm.now
    while not of(ins.HangUp, vm.tick(at=vm.now)):
        vm.now += 0.5
    vm.handle(ev.StreamClosed("hung up"))
    return vm.now - began


def test_an_agent_waits_longer_for_its_welcome_after_each_stream_that_was_given_up() -> None:
    vm = Vm()
    vm.handle(ev.StreamClosed("the manager was killed"))
    vm.handle(ev.StreamOpened())
    vm.handle(ev.StreamClosed("refused"))
    assert [find_patience(vm) for _ in range(4)] == [5.0, 10.0, 20.0, 20.0]


def test_an_agent_does_not_wait_for_its_welcome_until_much_of_its_lease_is_over() -> None:
    vm = Vm()
    vm.receive_message(welcome=pb.Welcome(lease_s=24.0, heartbeat_interval_s=1.0))
    vm.handle(ev.StreamClosed("the manager was killed"))
    assert [find_patience(vm) for _ in range(4)] == [5.0, 10.0, 12.0, 12.0]


def test_a_message_makes_an_agent_as_impatient_as_before() -> None:
    vm = Vm()
    vm.handle(ev.StreamClosed("gone"))
    assert [find_patience(vm) for _ in range(2)] == [5.0, 10.0]
    vm.handle(ev.StreamOpened())
    vm.receive_message(welcome=pb.Welcome(lease_s=60.0, heartbeat_interval_s=1.0))
    vm.now += 4.5
    assert of(ins.HangUp, vm.tick(at=vm.now)) == []
    vm.now += 0.5
    assert len(of(ins.HangUp, vm.tick(at=vm.now))) == 1
    vm.handle(ev.StreamClosed("hung up"))
    assert find_patience(vm) == 5.0


# ---------------------------------------------------------------- the agent's end


def test_a_drained_agent_launches_nothing_and_goes_when_its_reports_are_stored() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    assert vm.receive_message(drain=pb.Drain(reason="spot")) == []
    assert "draining: spot" in sent(vm.receive_message(launch=launch(2)), "command_refused")[0].reason
    assert vm.phases() == {key(): WorkerPhase.READY}
    assert of(ins.ExitAgent, vm.ended(key(), 0)) == []
    assert of(ins.ExitAgent, vm.receive_message(ack=pb.Ack(reports_through=99))) == [ins.ExitAgent(0, "draining: spot")]


def test_a_drained_agent_does_not_wait_for_a_lost_manager_for_ever() -> None:
    vm = Vm()
    vm.handle(ev.NoticeReceived("n", 30.0, "file"))
    vm.receive_message(drain=pb.Drain())
    vm.handle(ev.StreamClosed("gone"))
    assert vm.state.next_deadline() == 110.0
    assert len(of(ins.ExitAgent, vm.tick(at=110.0))) == 1
    assert of(ins.ExitAgent, vm.tick(at=111.0)) == []


def test_an_agent_that_is_drained_stays_so_when_a_signal_ends_it() -> None:
    vm = Vm()
    vm.handle(ev.TerminationRequested("SIGTERM"))
    assert not vm.state.is_drained
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.receive_message(drain=pb.Drain())
    vm.handle(ev.TerminationRequested("SIGTERM"))
    assert vm.state.is_drained


def test_an_idle_agent_that_is_drained_goes_at_once() -> None:
    assert of(ins.ExitAgent, Vm().receive_message(drain=pb.Drain())) == [
        ins.ExitAgent(0, "draining: the manager ordered it")
    ]


def test_an_agent_that_is_asked_to_end_lets_its_workers_leave() -> None:
    vm = Vm()
    vm.receive_message(launch=launch(ranks=[1, 2]))
    vm.ready(key())
    instructions = vm.handle(ev.TerminationRequested("SIGTERM"))
    assert [type(i) for i in instructions] == [ins.SendLeave, ins.KillWorker]
    vm.ended(key(rank=2), -9)
    vm.ended(key(), 75)
    assert of(ins.ExitAgent, vm.instructions) == []
    assert of(ins.ExitAgent, vm.tick(at=101.0)) == [ins.ExitAgent(0, "SIGTERM")]


def test_a_refused_agent_kills_and_fails() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    assert len(of(ins.KillWorker, vm.receive_message(refused=pb.Refused(reason="unknown VM")))) == 1
    (exit_agent,) = of(ins.ExitAgent, vm.ended(key(), -9))
    assert exit_agent.code == 1
    assert "unknown VM" in exit_agent.reason


# ---------------------------------------------------------------- ends that are nobody's fault


@pytest.mark.parametrize("code", [75, -9])
def test_workers_that_end_with_their_agent_are_not_the_jobs_failure(code: int) -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    vm.handle(ev.TerminationRequested("the agent is to end (SIGTERM)"))
    (exited,) = sent(vm.ended(key(), code), "worker_exited")
    assert exited.cause == pb.EXIT_CAUSE_AGENT_ENDED
    assert exited.error_text == "the agent is to end (SIGTERM)"


def test_a_script_that_fails_while_its_agent_ends_has_still_failed() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    vm.receive_worker_message(key(), failure=w.WorkerFailure(traceback="ValueError: x"))
    vm.handle(ev.TerminationRequested("SIGTERM"))
    assert exits(vm.ended(key(), 1)) == [(1, 1, "SCRIPT_FAILED")]


def test_a_save_is_timed_where_it_happens_and_only_when_it_was_one() -> None:
    def saved_s(code: int, *stops: pb.Stop) -> float:
        vm = Vm(timings=Timings(silence_s=1000.0))
        vm.receive_message(launch=launch())
        vm.ready(key())
        for one in stops:
            vm.receive_message(stop=one)
        vm.now += 2.5
        (exited,) = sent(vm.ended(key(), code), "worker_exited")
        return float(exited.save_s)

    saves, leaves = stop(mode=pb.STOP_MODE_SAVE_FIRST, grace_s=30), stop(grace_s=30)
    assert saved_s(75, saves) == 2.5
    assert saved_s(75, leaves) == saved_s(75, saves, leaves) == saved_s(76, saves) == saved_s(75) == 0.0


def test_a_worker_that_could_not_reach_a_peer_is_reported_with_it() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.handle(ev.WorkerConnected(key(), 77))
    vm.receive_worker_message(key(), unreached=pb.Unreached(rank=3, error="timed out"))
    (exited,) = sent(vm.ended(key(), 76), "worker_exited")
    assert (exited.HasField("unreached"), exited.unreached.rank) == (True, 3)


def test_a_worker_that_connects_is_given_the_secret_of_its_generation() -> None:
    vm = Vm()
    vm.receive_message(launch=launch(secret="5ec3e7"))
    (start,) = of(ins.StartWorker, vm.instructions)
    (admit,) = of(ins.AdmitWorker, vm.handle(ev.WorkerConnected(key(), 77)))
    assert (admit.key, admit.secret) == (key(), "5ec3e7")
    assert "5ec3e7" not in repr((start, admit))
