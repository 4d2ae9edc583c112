"""Policies, action arrays and the simulator: the paper's figure 4, ANCHORS' table, and what always holds."""

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import check_schedule, draw_schedule, format_schedule, make_schedule, make_timeline, parse_schedule
from varuna_planner.cutting.pipeline import Pipeline
from varuna_planner.schedule.actions import Action
from varuna_planner.schedule.batching import (
    apportion,
    micro_batch_sizes,
    micro_batches,
    renumber_micro_batches,
    shared_micro_batch,
)
from varuna_planner.schedule.policies import (
    NO_TIMING,
    WAIT,
    Op,
    Policy,
    StageOrders,
    StageProgress,
    choose,
    most_in_flight,
    parse_policy,
    stash_cap,
)
from varuna_planner.simulator.simulation import (
    Jitter,
    MinibatchTimes,
    fixed_order,
    lower_bound,
    replay,
    simulate,
    uniform,
)

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
    assert draw_schedule(make_schedule(Policy.VARUNA, 4, 5, run_ahead=NO_CAP)).splitlines() == [
        "S1   F0 F1 F2 F3 F4 R0 .. .. .. .. B0 -- R1 B1 -- R2 B2 -- R3 .. .. .. B3 -- R4 B4 --",
        "S2   .. F0 F1 F2 F3 F4 R0 .. B0 -- R1 B1 -- R2 B2 -- R3 .. .. .. B3 -- R4 B4 -- .. ..",
        "S3   .. .. F0 F1 F2 R0 B0 -- R1 B1 -- R2 B2 -- F3 F4 R3 .. B3 -- R4 B4 -- .. .. .. ..",
        "S4   .. .. .. F0 B0 -- F1 B1 -- F2 B2 -- .. .. .. F3 B3 -- F4 B4 -- .. .. .. .. .. ..",
    ]


@pytest.mark.long
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
    live = simulate(pipeline, Policy.VARUNA, run_ahead=NO_CAP)
    assert live.makespan_us == replay(pipeline, live) == varuna
    if N > P + 1:
        assert simulate(pipeline, Policy.WORK_CONSERVING, run_ahead=P).makespan_us == bound


@pytest.mark.parametrize(
    ("P", "N", "latency", "live"), [(8, 128, 0.25, 541), (18, 128, 0.5, 592), (36, 128, 0.25, 639)]
)
def test_a_stage_that_knows_too_early_recomputes_too_early(P: int, N: int, latency: float, live: float) -> None:
    """With foresight a stage recomputes while it waits for an activation, and then starts no forward. As a static
    schedule, which never waits on purpose, the order is as good as any."""
    pipeline = uniform(P, N, latency_us=latency)
    found = simulate(pipeline, Policy.VARUNA, run_ahead=NO_CAP, foresight=True)
    assert found.makespan_us == live
    assert replay(pipeline, found) == lower_bound(pipeline)


@pytest.mark.parametrize(("P", "makespan"), [(4, 515), (8, 523), (18, 543), (36, 579)])
def test_zero_bubble_with_two_activation_sets(P: int, makespan: float) -> None:
    """ANCHORS' figures for N=128 without latency: the least there can be with a split backward and two sets."""
    pipeline = uniform(P, 128)
    found = simulate(pipeline, Policy.ZERO_BUBBLE)
    assert found.makespan_us == lower_bound(pipeline, split_backward=True) == makespan
    assert found.stash[0] == P + 1
    for actions in found.actions:
        alive = most = 0
        for op, _ in actions:
            # Without recompute activations live from F on, which is how the last stage has it.
            alive += (op == (Op.R if actions is not found.actions[-1] else Op.F)) - (op == Op.W)
            most = max(most, alive)
        assert most == 2


JITTERS = [Jitter(latency_us=0.5, compute=0.05, seed=seed) for seed in range(8)]


@pytest.mark.parametrize(
    ("policy", "run_ahead", "makespan", "stash"),
    [
        (Policy.ONE_F_ONE_B, 0, 909, 18),
        (Policy.VARUNA, NO_CAP, 607, 105),
        (Policy.VARUNA, 36, 613, 54),  # a cap of 3P
        (Policy.WORK_CONSERVING, 18, 636, 36),
        (Policy.WORK_CONSERVING, 36, 602, 54),
    ],
)
def test_run_ahead_buys_tolerance_of_jitter(policy: Policy, run_ahead: int, makespan: float, stash: int) -> None:
    """ANCHORS: P=18, N=128, latency 0.5 + Exp(0.5), 5 % noise. Means over 8 seeds, within 2 % (they spread by 1 %)."""
    pipeline = uniform(18, 128, latency_us=0.5, last_recomputes=policy == Policy.ONE_F_ONE_B)
    runs = [simulate(pipeline, policy, run_ahead=run_ahead, jitter=jitter) for jitter in JITTERS]
    assert np.mean([run.makespan_us for run in runs]) == pytest.approx(makespan, rel=0.02)
    # Without a cap the largest stash is a matter of chance.
    assert np.mean([run.stash[0] for run in runs]) == pytest.approx(stash, rel=0.05 if run_ahead == NO_CAP else 0)


def test_early_recompute_alone_tolerates_no_jitter() -> None:
    """ANCHORS, the same: 1F1B's order with R as early as it can, 788."""
    pipeline = uniform(18, 128, latency_us=0.5)
    order = simulate(pipeline, Policy.ONE_F_ONE_B)
    makespans = [replay(pipeline, order, jitter=jitter) for jitter in JITTERS]
    assert np.mean(makespans) == pytest.approx(788, rel=0.02)


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
    assert check_schedule(result.actions) == N
    for stage, actions in enumerate(result.actions):
        assert [a.micro_batch for a in actions if a.op == Op.B] == list(range(N))
        assert sum(a.op == Op.R for a in actions) == (N if pipeline.recompute[stage] else 0)
        assert sum(a.op == Op.W for a in actions) == (N if policy is Policy.ZERO_BUBBLE else 0)
        most = most_in_flight(policy.code, stage, P, N, run_ahead)
        assert result.stash[stage] <= most <= stash_cap(policy.code, stage, P, N, run_ahead)
    if not disturbed:
        assert result.makespan_us >= lower_bound(pipeline, split_backward=policy is Policy.ZERO_BUBBLE) - 1e-9


@pytest.mark.parametrize("run_ahead", [0, 4, 8])
def test_a_slow_stage_fills_the_windows_of_all_before_it(run_ahead: int) -> None:
    """So memory is planned for whole windows, although a pipeline without disturbance needs less of the later ones."""
    P, N, policy = 4, 64, Policy.WORK_CONSERVING
    pipeline = uniform(P, N)
    slow = [np.array(times) for times in (pipeline.forward_us, pipeline.backward_us)]
    for times in slow:
        times[:, -1] *= 10
    disturbed = replace(pipeline, forward_us=slow[0], backward_us=slow[1])
    most = [most_in_flight(policy.code, stage, P, N, run_ahead) for stage in range(P)]
    assert list(simulate(disturbed, policy, run_ahead=run_ahead).stash) == most
    if run_ahead == 8:
        assert list(simulate(pipeline, policy, run_ahead=run_ahead).stash) == [9, 6, 3, 1]


@settings(deadline=None, max_examples=150)
@given(pipelines(), POLICIES, st.integers(0, 4), st.booleans())
def test_playing_a_policys_order_takes_the_time_the_policy_took(
    pipeline: Pipeline, policy: Policy, run_ahead: int, disturbed: bool
) -> None:
    jitter = Jitter(latency_us=5, compute=0.2, seed=1) if disturbed else None
    result = simulate(pipeline, policy, run_ahead=run_ahead, jitter=jitter)
    late = policy == Policy.ONE_F_ONE_B
    played = fixed_order(pipeline, result.actions, late_recompute=late, jitter=jitter)
    assert played == replay(pipeline, result, late_recompute=late, jitter=jitter)
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
    times = {"forward": forward, "recompute_ticks": recompute, "backward": backward, "weight": backward}
    plain = make_schedule(policy, P, N, run_ahead=run_ahead, **times)
    whole = backward * (2 if policy is Policy.ZERO_BUBBLE else 1)
    pipeline = uniform(P, N, forward_us=forward, recompute_us=recompute, backward_us=whole)
    found = simulate(pipeline, policy, run_ahead=run_ahead, foresight=True, record=True)
    assert found.actions == plain
    spans = make_timeline(plain, forward, recompute, backward, weight=backward)
    assert fixed_order(pipeline, plain) == max(row[-1].end for row in spans)
    if policy not in (Policy.VARUNA, Policy.ONE_F_ONE_B):  # those wait on purpose
        for stage, row in enumerate(spans):
            assert found.spans_us[0, stage, : len(row)].tolist() == [span.start for span in row]
            assert found.spans_us[1, stage, : len(row)].tolist() == [span.end for span in row]


@settings(deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.sampled_from([policy for policy in Policy if policy.executable]),
    st.integers(0, 4),
    st.data(),
)
def test_an_engine_that_knows_no_times_completes(
    P: int, N: int, policy: Policy, run_ahead: int, data: st.DataObject
) -> None:
    """Stages act in any order, messages take effect at once, and `choose` gets no estimate."""
    done = [[0, 0, 0] for _ in range(P)]
    steps = 0
    while any(stage[Op.B] < N for stage in done):
        able = []
        for s, (forwards, recomputes, backwards) in enumerate(done):
            activations = N if s == 0 else done[s - 1][Op.F]
            gradients = forwards if s == P - 1 else done[s + 1][Op.B]
            op = choose(
                StageOrders(policy.code, s, P, N, run_ahead, recompute=s < P - 1),
                StageProgress(forwards, recomputes, backwards, activations, gradients),
                NO_TIMING,
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
        ("F0 W0 B0\nF0 B0 W0", "stage 0: W0 comes before B0"),
        ("F0 F1 B0 B1 W0\nF0 B0 F1 B1", "stage 0: 2 backwards are split but only 1 have their W"),
    ],
)
def test_a_wrong_schedule_is_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_schedule(parse_schedule(text))


def test_a_fixed_order_that_deadlocks_is_refused() -> None:
    with pytest.raises(ValueError, match="deadlocks"):
        fixed_order(uniform(2, 2), parse_schedule("F0 B0 F1 B1\nF0 F1 B0 B1"))


def test_a_link_carries_one_message_at_a_time() -> None:
    """A transfer three times as long as a forward makes the link the bottleneck."""
    pipeline = uniform(2, 4, latency_us=2)
    pipeline.activation_transfer_us[:, 0] = 3
    # The last activation leaves at 1 + 4 * 3 and arrives 2 later; F, B, the gradient's latency, B.
    assert simulate(pipeline, Policy.GPIPE).makespan_us >= 1 + 12 + 2 + 1 + 2 + 2 + 2


def test_a_course_takes_the_place_of_the_pipelines_times() -> None:
    pipeline = uniform(2, 2, last_recomputes=False)
    action = np.zeros((3, 2, 2))
    action[0], action[1], action[2] = [[1, 2], [3, 4]], [[5, 6], [0, 0]], [[7, 8], [9, 10]]
    delay = np.zeros((2, 2, 2))
    delay[0, 1, 0], delay[1, 0, 1] = 0.5, 0.25
    course = MinibatchTimes(action_us=action, delay_us=delay)
    # F0 is done at 1, arrives at 1.5: F0 B0 F1 B1 take 3 9 4 10; B1's gradient comes at 27.75, and takes 8.
    assert simulate(pipeline, Policy.ONE_F_ONE_B, jitter=course).makespan_us == 1.5 + 3 + 9 + 4 + 10 + 0.25 + 6 + 8
    assert fixed_order(pipeline, parse_schedule("F0 F1 R0 B0 R1 B1\nF0 B0 F1 B1"), jitter=course) == 35.75


def test_a_policy_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="policy 'fifo' is not known: choose one of gpipe, 1f1b, varuna, work-cons"):
        parse_policy("fifo")


@pytest.mark.processes
def test_what_workers_import_needs_no_numba_and_no_torch() -> None:
    script = (
        "import sys;"
        "import varuna_planner.schedule.policies, varuna_planner.schedule.actions, varuna_planner.schedule.batching;"
        "sys.exit(any(name in sys.modules for name in ('numba', 'numpy', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.processes
def test_a_new_process_finds_the_loops_compiled() -> None:
    fixed_order(uniform(2, 2), simulate(uniform(2, 2), Policy.VARUNA).actions)  # compiles what nobody has yet
    script = (
        "from varuna_planner.schedule.policies import Policy;"
        "from varuna_planner.simulator import _event_loop, simulation;"
        "pipeline = simulation.uniform(2, 2);"
        "simulation.replay(pipeline, simulation.simulate(pipeline, Policy.VARUNA));"
        "loops = (_event_loop.simulate, _event_loop.fixed_order);"
        "print([sum(loop.stats.cache_misses.values()) for loop in loops])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[0, 0]"


def test_replicas_run_the_shares_that_they_are_given() -> None:
    assert micro_batches(48, 4, 3, (6, 4, 2)) == (range(6), range(6, 10), range(10, 12))
    assert micro_batches(48, 4, 3, ()) == micro_batches(48, 4, 3)


@pytest.mark.parametrize("shares", [(6, 6), (6, 4, 1), (12, 0, 0), (-1, 12, 1)])
def test_shares_that_do_not_cover_the_global_batch_are_refused(shares: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="give 3 whole numbers of at least 1 whose sum is the 12 micro-batches"):
        micro_batches(48, 4, 3, shares)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12), st.integers(0, 200))
def test_shares_by_weight_are_whole_and_near_their_quotas(weights: list[float], more: int) -> None:
    count = len(weights) + more
    shares = apportion(count, weights)
    assert sum(shares) == count
    assert min(shares) >= 1
    quotas = [count * weight / sum(weights) for weight in weights]
    if min(quotas) >= 1:
        assert all(abs(share - quota) < 1 + 1e-9 for share, quota in zip(shares, quotas, strict=True))


def test_shares_that_are_in_proportion_already_stay() -> None:
    assert apportion(12, (6, 4, 2)) == (6, 4, 2)
    assert apportion(7, (1, 1, 1)) == (3, 2, 2)
    with pytest.raises(ValueError, match="each of at least 1"):
        apportion(2, (1, 1, 1))


@pytest.mark.parametrize(
    ("sizes", "shared"),
    [((4, 4), 4), ((4, 2), 2), ((2, 4), 2), ((1, 7), 1), ((4, 6), None), ((3, 2), None), ((4,), 4), ((4, 2, 6), 2)],
)
def test_micro_batches_are_whole_ones_of_the_smallest_or_share_none(sizes: tuple[int, ...], shared: int | None) -> None:
    assert shared_micro_batch(*sizes) == shared


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 60), st.sets(st.integers(0, 59)))
def test_micro_batches_keep_their_examples_when_they_are_numbered_anew(
    after: int, parts: int, global_batch: int, wanted: set[int]
) -> None:
    before = after * parts

    def list_examples(numbers: Iterable[int], micro_batch: int) -> list[int]:
        sizes = micro_batch_sizes(global_batch, micro_batch)
        return [number * micro_batch + place for number in numbers for place in range(sizes[number])]

    numbers = sorted(number for number in wanted if number * before < global_batch)
    anew = renumber_micro_batches(numbers, before=before, after=after, global_batch=global_batch)
    assert list_examples(anew, after) == list_examples(numbers, before)
