"""What workers report to their agent, and how they leave at its command."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_end import AgentEnd
from small_gpt import Task, train_plainly
from training_world import Ranks, Zygote
from varuna.checkpoint import newest_complete
from varuna_proto.environment import EXIT_GENERATION_ENDED, EXIT_PEER_LOST
from varuna_proto.v1 import agent_pb2


def test_save_first_reaches_every_rank_and_nothing_is_lost(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=500, learning_rate=1e-3)
    store = str(tmp_path / "store")
    with (
        AgentEnd() as first,
        AgentEnd() as second,
        Ranks(
            zygote,
            tmp_path,
            task,
            2,
            1,
            checkpoint_url=store,
            agent_socket=[first.path, second.path].__getitem__,
            wanted={"forever": True, "waits_are_woken": True},
        ) as world,
    ):
        assert first.wait_for(lambda message: message.HasField("ready")).ready.resumed_step == 0
        second.wait_for(lambda message: message.step_done.step == 10)
        second.send_leave(agent_pb2.STOP_MODE_SAVE_FIRST)
        codes = world.exit_codes()

    assert codes == [EXIT_GENERATION_ENDED] * 2, world.logs()
    done = first.steps()
    saved = newest_complete(store)
    assert saved == done[-1].step
    checkpoints = [message.checkpoint_done for message in first.messages if message.HasField("checkpoint_done")]
    assert checkpoints[-1].step == saved
    expected = train_plainly(Task(steps=saved, learning_rate=1e-3))
    assert [step.loss for step in done] == pytest.approx(expected.losses, rel=1e-4)
    assert all(step.examples == task.global_batch and step.memory_bytes > 0 for step in done)
    assert all(step.forward_us > 0 and step.backward_us > 0 for step in done)
    # The script's scheduler halves it after each second step.
    assert [step.learning_rate for step in done] == pytest.approx([1e-3 * 0.5 ** (n // 2) for n in range(len(done))])
    assert [step.gradient_norm for step in done] == pytest.approx(expected.norms, rel=1e-3)
    # Each rank has half of the gradients and reports the norm of all.
    norms = [step.gradient_norm for step in second.steps()]
    assert [step.gradient_norm for step in done] == norms[: len(done)]


def test_a_step_lasts_from_the_one_before_and_says_what_lay_between(zygote: Zygote, tmp_path: Path) -> None:
    wanted = {"pause_s": 0.2, "save": {"step": 2, "url": str(tmp_path / "store")}}
    with (
        AgentEnd() as agent,
        Ranks(zygote, tmp_path, Task(steps=4), 1, 1, agent_socket=lambda rank: agent.path, wanted=wanted) as world,
    ):
        assert world.exit_codes() == [0], world.logs()
    first, *others = agent.steps()
    assert first.between == agent_pb2.BetweenSteps(), "nothing lies before the first step"
    for step in others:
        between = step.between
        assert between.data_us > 0
        assert between.data_us + between.checkpoint_us + between.script_us < step.step_us, "the rest is the step itself"
    assert max(others, key=lambda step: step.between.checkpoint_us).step == 3, "the script saved after step 2"
    assert others[-1].between.script_us >= 200_000, "it slept after step 3"


def test_an_agent_is_told_which_step_has_updated_nothing(zygote: Zygote, tmp_path: Path) -> None:
    wanted = {"overflow": {"rank": 0, "step": 2}}
    with (
        AgentEnd() as agent,
        Ranks(zygote, tmp_path, Task(steps=3), 1, 1, agent_socket=lambda rank: agent.path, wanted=wanted) as world,
    ):
        assert world.exit_codes() == [0], world.logs()
    assert [(done.step, done.skipped) for done in agent.steps()] == [(1, False), (2, True), (3, False)]


def test_ranks_with_the_secret_of_their_agents_train_together(zygote: Zygote, tmp_path: Path) -> None:
    ends = [AgentEnd("5ec3e7") for _ in range(2)]
    with (
        ends[0],
        ends[1],
        Ranks(
            zygote,
            tmp_path,
            Task(steps=2),
            2,
            1,
            agent_socket=[end.path for end in ends].__getitem__,
            environ={"VARUNA_SECRET_FROM_AGENT": "1"},
        ) as world,
    ):
        outcome = world.finish()
    assert outcome.losses == pytest.approx(train_plainly(Task(steps=2)).losses, rel=1e-5)
    assert "5ec3e7" not in world.logs()


def test_leave_now_and_a_closed_socket_end_workers_at_once(zygote: Zygote, tmp_path: Path) -> None:
    forever = {"forever": True}
    with (
        AgentEnd() as leaving,
        AgentEnd() as other,
        AgentEnd() as closing,
        Ranks(
            zygote, tmp_path / "a", Task(), 2, 1, agent_socket=[leaving.path, other.path].__getitem__, wanted=forever
        ) as pair,
        Ranks(zygote, tmp_path / "b", Task(), 1, 1, agent_socket=lambda _: closing.path, wanted=forever) as alone,
    ):
        leaving.wait_for(lambda message: message.step_done.step == 2)
        leaving.send_leave(agent_pb2.STOP_MODE_LEAVE_NOW)
        closing.wait_for(lambda message: message.step_done.step == 2)
        closing.hang_up()
        codes = pair.exit_codes()
        assert alone.exit_codes() == [EXIT_GENERATION_ENDED]

    assert codes == [EXIT_GENERATION_ENDED, EXIT_PEER_LOST]


def test_a_script_that_raises_is_reported_with_its_traceback(zygote: Zygote, tmp_path: Path) -> None:
    failing = {"raise": {"rank": 1, "step": 2}}
    with (
        AgentEnd() as first,
        AgentEnd() as second,
        Ranks(
            zygote, tmp_path, Task(), 2, 1, agent_socket=[first.path, second.path].__getitem__, wanted=failing
        ) as world,
    ):
        failure = second.wait_for(lambda message: message.HasField("failure")).failure
        codes = world.exit_codes()

    assert codes == [EXIT_PEER_LOST, 1]
    assert "ArithmeticError: rank 1 was told to raise at step 2" in failure.traceback
    assert "training_script.py" in failure.traceback


def test_an_evaluation_says_that_it_gets_on(zygote: Zygote, tmp_path: Path) -> None:
    with (
        AgentEnd() as first,
        AgentEnd() as second,
        Ranks(zygote, tmp_path, Task(steps=1), 2, 1, agent_socket=[first.path, second.path].__getitem__) as world,
    ):
        counts = [end.wait_for(lambda message: message.HasField("evaluated")).evaluated for end in (first, second)]
        world.finish()

    assert all(count.micro_batches > 0 for count in counts)
