"""Policies, action arrays and the simulator: the paper's figure 4, ANCHORS' table, and what always holds."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_planner.actions import Action, check, draw, format_schedule, generate, parse_schedule, timeline
from varuna_planner.schedule import WAIT, Op, Policy, choose, most_in_flight, stash_cap
from varuna_planner.simulator import Jitter, Pipeline, fixed_order, lower_bound, simulate, uniform

POLICIES = st.sampled_from(Policy)
NO_CAP = 10_000


def test_figure_4_of_the_paper() -> None:
    """4 stages, 5 micro-batches, F = R = 1, B = 2."""
    assert simulate(uniform(4, 5), Policy.GPIPE).makespan_us == 28
    assert simulate(uniform(4, 5), Policy.VARUNA, run_ahead=NO_CAP).makespan_us == 27
    # As its authors run it, 1F1B recomputes in the last stage too.
    assert simulate(uniform(4, 5, last_recomputes=True), Policy.ONE_F_ONE_B).makespan_us == 32
    assert lower_bound(uniform(4, 5)) == 26


def test_varuna_draws_as_in_figure_4() -> None:
    """The last stage never recomputes, and the third has forwards between its backwards."""
    assert draw(generate(Policy.VARUNA, 4, 5, run_ahead=NO_CAP)).splitlines() == [
        "S1   F0 F1 F2 F3 F4 R0 .. .. .. .. B0 -- R1 B1 -- R2 B2 -- R3 .. .. .. B3 -- R4 B4 --",
        "S2   .. F0 F1 F2 F3 F4 R0 .. B0 -- R1 B1 -- R2 B2 -- R3 .. .. .. B3 -- R4 B4 -- .. ..",
        "S3   .. .. F0 F1 F2 R0 B0 -- R1 B1 -- R2 B2 -- F3 F4 R3 .. B3 -- R4 B4 -- .. .. .. ..",
        "S4   .. .. .. F0 B0 -- F1 B1 -- F2 B2 -- .. .. .. F3 B3 -- F4 B4 -- .. .. .. .. .. ..",
    ]


@pytest.mark.parametrize(
    ("P", "N", "latency", "bound", "gpipe", "one_f_one_b", "early", "varuna"),
    [
        (4, 5, 0, 26, 28, 32, 27, 27),
        (8, 128, 0.25, 533, 535.5, 599, 534.5, 533),
        (18, 128, 0.5, 576, 579, 716, 578, 576),
        (36, 128, 0.25, 631, 633.5, 731, 632.5, 631),
    ],
)
def test_makespans_of_anchors_table(
    P: int, N: int, latency: float, bound: float, gpipe: float, one_f_one_b: float, early: float, varuna: float
) -> None:
    pipeline = uniform(P, N, latency_us=latency)
    assert lower_bound(pipeline) == bound
    assert simulate(pipeline, Policy.GPIPE).makespan_us == gpipe
    late = uniform(P, N, latency_us=latency, last_recomputes=True)
    assert simulate(late, Policy.ONE_F_ONE_B).makespan_us == one_f_one_b
    order = simulate(pipeline, Policy.ONE_F_ONE_B).actions
    assert fixed_order(pipeline, order) == early
    # The paper's static schedule: the policy's order, played as it is.
    order = simulate(pipeline, Policy.VARUNA, run_ahead=NO_CAP).actions
    assert fixed_order(pipeline, order) == varuna
    if N > P + 1:
        assert simulate(pipeline, Policy.WORK_CONSERVING, run_ahead=P).makespan_us == bound


def test_run_ahead_buys_tolerance_of_jitter() -> None:
    """ANCHORS: P=18, N=128, latency 0.5 + Exp(0.5), 5 % noise: 1F1B 909, Varuna 607, work-conserving 636, then 602."""

    def mean(policy: Policy, run_ahead: int) -> float:
        pipeline = uniform(18, 128, latency_us=0.5, last_recomputes=policy == Policy.ONE_F_ONE_B)
        jitters = [Jitter(latency_us=0.5, compute=0.05, seed=seed) for seed in range(5)]
        runs = [simulate(pipeline, policy, run_ahead=run_ahead, jitter=jitter) for jitter in jitters]
        return sum(run.makespan_us for run in runs) / len(runs)

    assert mean(Policy.ONE_F_ONE_B, 0) == pytest.approx(909, rel=0.03)
    assert mean(Policy.VARUNA, NO_CAP) == pytest.approx(607, rel=0.03)
    assert mean(Policy.WORK_CONSERVING, 18) == pytest.approx(636, rel=0.03)
    assert mean(Policy.WORK_CONSERVING, 36) == pytest.approx(602, rel=0.03)


@st.composite
def pipelines(draw_value: st.DrawFn) -> Pipeline:
    """Stages of any speed, some without recompute; links of any speed; a short last micro-batch."""
    P, N = draw_value(st.integers(1, 6)), draw_value(st.integers(1, 12))
    base = uniform(P, N)
    rows = st.lists(st.integers(1, 9), min_size=2 * P, max_size=2 * P)

    def times(least: int) -> list[float]:
        return [least * value for value in draw_value(rows)]

    for array in (base.forward_us, base.recompute_us, base.backward_us):
        array.flat[:] = times(1)
    if draw_value(st.booleans()):
        for array in (base.activation_transfer_us, base.gradient_transfer_us):
            array.flat[:] = times(1)
        base.latency_us[:] = draw_value(st.lists(st.integers(0, 9), min_size=P, max_size=P))
    base.finish_us[:] = draw_value(st.lists(st.integers(0, 30), min_size=P, max_size=P))
    base.recompute[:] = draw_value(st.lists(st.booleans(), min_size=P, max_size=P))
    return base


@settings(deadline=None, max_examples=150)
@given(pipelines(), POLICIES, st.integers(0, 4), st.booleans())
def test_every_policy_completes_in_order_within_its_cap(
    pipeline: Pipeline, policy: Policy, run_ahead: int, disturbed: bool
) -> None:
    jitter = Jitter(latency_us=5, compute=0.2, seed=1) if disturbed else None
    result = simulate(pipeline, policy, run_ahead=run_ahead, jitter=jitter)
    P, N = pipeline.stages, pipeline.micro_batches
    assert check(result.actions) == N
    for stage, actions in enumerate(result.actions):
        assert [a.micro_batch for a in actions if a.op == Op.B] == list(range(N))
        assert sum(a.op == Op.R for a in actions) == (N if pipeline.recompute[stage] else 0)
        most = most_in_flight(policy.code, stage, P, N, run_ahead)
        assert result.stash[stage] <= most <= stash_cap(policy.code, stage, P, N, run_ahead)
    if not disturbed:
        assert result.makespan_us >= lower_bound(pipeline) - 1e-9


@settings(deadline=None, max_examples=150)
@given(pipelines(), POLICIES, st.integers(0, 4))
def test_playing_a_policys_order_takes_the_time_the_policy_took(
    pipeline: Pipeline, policy: Policy, run_ahead: int
) -> None:
    result = simulate(pipeline, policy, run_ahead=run_ahead)
    played = fixed_order(pipeline, result.actions, late_recompute=policy == Policy.ONE_F_ONE_B)
    if policy == Policy.VARUNA:
        assert played <= result.makespan_us + 1e-9  # it waits on purpose, the order alone does not
    else:
        assert played == pytest.approx(result.makespan_us)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 6),
    st.integers(1, 12),
    POLICIES,
    st.integers(0, 8),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 5),
)
def test_the_compiled_simulator_does_what_plain_python_does(
    P: int, N: int, policy: Policy, run_ahead: int, forward: int, recompute: int, backward: int
) -> None:
    plain = generate(policy, P, N, run_ahead=run_ahead, forward=forward, recompute_ticks=recompute, backward=backward)
    pipeline = uniform(P, N, forward_us=forward, recompute_us=recompute, backward_us=backward)
    assert simulate(pipeline, policy, run_ahead=run_ahead).actions == plain
    spans = timeline(plain, forward, recompute, backward)
    assert fixed_order(pipeline, plain) == max(row[-1].end for row in spans)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), POLICIES, st.integers(0, 4), st.data())
def test_an_engine_that_knows_no_times_completes(
    P: int, N: int, policy: Policy, run_ahead: int, data: st.DataObject
) -> None:
    """Stages act in any order, messages take effect at once, and `choose` gets no estimate."""
    done = [[0, 0, 0] for _ in range(P)]
    steps = 0
    while any(stage[Op.B] < N for stage in done):
        able = []
        for s, (forwards, recomputes, backwards) in enumerate(done):
            op = choose(
                policy.code,
                s,
                P,
                N,
                run_ahead,
                s < P - 1,
                forwards,
                recomputes,
                backwards,
                N if s == 0 else done[s - 1][Op.F],
                forwards if s == P - 1 else done[s + 1][Op.B],
            )
            if op != WAIT:
                able.append((s, op))
        assert able, "deadlock"
        s, op = data.draw(st.sampled_from(able))
        done[s][op] += 1
        steps += 1
        assert done[s][Op.F] - done[s][Op.B] <= most_in_flight(policy.code, s, P, N, run_ahead)
    assert steps == N * (3 * P - 1)


actions = st.builds(Action, st.sampled_from(Op), st.integers(0, 10_000))


@given(st.lists(st.lists(actions, max_size=8).map(tuple), min_size=1, max_size=5).map(tuple))
def test_schedules_print_and_parse(schedule: tuple[tuple[Action, ...], ...]) -> None:
    assert parse_schedule(format_schedule(schedule)) == schedule


@pytest.mark.parametrize("word", ["X0", "F", "F-1", "F01", "f0", "0F"])
def test_a_word_that_is_no_action_is_named(word: str) -> None:
    with pytest.raises(ValueError, match=f"stage 1: '{word}' is not an action"):
        parse_schedule(f"F0 B0\nF0 {word}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0 F1 B0 B1\nF1 F0 B0 B1", "stage 1: F1 is out of order, F0 is next"),
        ("F0 B0\nF0 F1 B0 B1", "differ in their number of forwards"),
        ("F0 F1 B0\nF0 F1 B0 B1", "stage 0: 2 forwards but 1 backwards"),
        ("F0 B0 R0\nF0 B0", "stage 0: R0 is out of order, R1 is next"),
        ("B0 F0\nF0 B0", "stage 0: B0 comes before F0"),
        ("F0 B0 F1 B1\nF0 F1 B0 B1", "deadlock: stage 0 at B0, stage 1 at F1"),
    ],
)
def test_a_wrong_schedule_is_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(parse_schedule(text))


def test_a_fixed_order_that_deadlocks_is_refused() -> None:
    with pytest.raises(ValueError, match="deadlocks"):
        fixed_order(uniform(2, 2), parse_schedule("F0 B0 F1 B1\nF0 F1 B0 B1"))


def test_a_link_carries_one_message_at_a_time() -> None:
    """A transfer three times as long as a forward makes the link the bottleneck."""
    pipeline = uniform(2, 4, latency_us=2)
    pipeline.activation_transfer_us[:, 0] = 3
    # The last activation leaves at 1 + 4 * 3 and arrives 2 later; F, B, the gradient's latency, B.
    assert simulate(pipeline, Policy.GPIPE).makespan_us >= 1 + 12 + 2 + 1 + 2 + 2 + 2


def test_what_workers_import_needs_no_numba_and_no_torch() -> None:
    script = (
        "import sys, varuna_planner.schedule, varuna_planner.actions, varuna_planner.batching;"
        "sys.exit(any(name in sys.modules for name in ('numba', 'numpy', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
