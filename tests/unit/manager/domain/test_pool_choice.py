"""Which pools are asked for VMs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind, RefusalStreak
from varuna_manager.domain.pool_choice import PoolChoice, PoolConditions, PoolView, choose_pools, compute_value
from varuna_manager.domain.pools import PoolTerms

NOW = 1000.0
CONDITIONS = PoolConditions(join_s=300.0, stop_s=10.0)


def pool(
    name: str,
    *,
    price: float = 1.0,
    speed: float = 1.0,
    hazard: float = 0.1,
    vms: int = 0,
    most: int | None = None,
    gpu_type: str = "V100",
    gpus: int = 1,
    refused: int = 0,
    refused_at: float = NOW,
    closed: str = "",
) -> PoolView:
    streak = None
    if refused:
        last = Refusal(kind=RefusalKind.CAPACITY, reason="none left")
        streak = RefusalStreak(count=refused, last=last, last_at=refused_at)
    return PoolView(
        terms=PoolTerms(name=name, price_per_hour=price, relative_speed=speed, max_vms=most),
        gpus=gpus,
        gpu_type=gpu_type,
        price_per_hour=price,
        hazard_per_hour=hazard,
        vms=vms,
        paid_for=vms,
        refusals=streak,
        closed=closed,
    )


def choose(missing: int, *pools: PoolView, **conditions: object) -> PoolChoice:
    return choose_pools(NOW, missing, pools, replace(CONDITIONS, **conditions))


# ---------------------------------------------------------------- examples


def test_of_two_pools_the_one_with_more_for_a_dollar_gets_the_vms() -> None:
    assert choose(4, pool("cheap", price=1.0), pool("dear", price=2.0)).counts == {"cheap": 4}
    assert choose(4, pool("slow", speed=1.0), pool("fast", speed=2.0)).counts == {"fast": 4}
    assert choose(4, pool("small", gpus=1), pool("large", gpus=4)).counts == {"large": 4}


def test_a_faster_pool_may_cost_more() -> None:
    assert choose(1, pool("a", price=1.0), pool("b", price=2.0, speed=3.0)).counts == {"b": 1}


def test_losses_make_a_pool_worth_less() -> None:
    """A hundredfold, as between zones of published traces."""
    calm, wild = pool("calm", hazard=0.04), pool("wild", hazard=4.0)
    assert choose(8, calm, wild).counts == {"calm": 8}
    assert choose(8, calm, replace(wild, hazard_per_hour=0.04)).counts == {"calm": 4, "wild": 4}
    counts = choose(8, replace(calm, price_per_hour=1.2), wild).counts
    assert counts["calm"] > counts["wild"], "what it costs more is less than what losses take"


def test_pools_that_are_as_good_share_the_vms() -> None:
    assert choose(6, pool("a"), pool("b"), pool("c")).counts == {"a": 2, "b": 2, "c": 2}
    assert choose(3, pool("a", vms=3), pool("b")).counts == {"b": 3}


def test_a_pool_that_is_a_little_better_does_not_get_all() -> None:
    counts = choose(10, pool("a", price=1.0), pool("b", price=1.1)).counts
    assert counts["a"] > counts["b"] > 0


def test_a_pool_that_refused_is_left_alone_and_then_asked_for_one_vm() -> None:
    dry, other = pool("dry", price=0.5, refused=3, refused_at=NOW), pool("other")
    choice = choose(4, dry, other)
    assert choice.counts == {"other": 4}
    assert "dry: it has refused 3 times in a row (capacity) and is asked again in 4 s" in choice.reason
    later = replace(dry, refusals=replace(dry.refusals, last_at=NOW - 4.0))  # type: ignore[type-var]
    assert choose(4, later, other).counts == {"dry": 1, "other": 3}


def test_a_full_pool_is_passed_over() -> None:
    choice = choose(4, pool("full", price=0.5, vms=2, most=3), pool("other"))
    assert choice.counts == {"full": 1, "other": 3}
    assert (
        choose(1, pool("full", vms=3, most=3)).reason == "no pool can be asked; full: it has the 3 VMs that it may have"
    )


def test_a_limit_of_cost_is_kept() -> None:
    choice = choose(5, pool("a", price=2.0), pool("b", price=3.0), budget_per_hour=5.0)
    assert choice.counts == {"a": 2}
    assert choice.reason.endswith("1 an hour is left of the limit of cost")


def test_the_reason_names_what_a_dollar_buys() -> None:
    choice = choose(2, pool("a", price=1.0, hazard=0.0), pool("b", price=2.0, hazard=0.0), examples_per_s=10.0)
    a, b = "36,000 examples per dollar, 0 losses per VM-hour", "18,000 examples per dollar, 0 losses per VM-hour"
    assert choice.reason == f"2 of a ({a}); b ({b}) gets none"


def test_all_vms_are_of_one_type_of_gpu() -> None:
    a, b = pool("a", gpu_type="A100", price=2.0), pool("b", gpu_type="V100", price=1.0)
    assert choose(4, a, b).counts == {"b": 4}
    choice = choose(4, replace(a, vms=1), b)
    assert choice.counts == {"a": 4}
    assert "b: its GPUs are V100, and a job's are all equal" in choice.reason


def test_pools_of_all_types_are_asked_where_a_job_may_mix_them() -> None:
    pools = [pool("a", gpu_type="A100", most=2, speed=2.0), pool("b", gpu_type="V100")]
    choice = choose(5, *pools, mixes_types=True)
    assert choice.counts == {"a": 2, "b": 3}
    assert choose(5, *pools).counts == {"a": 2}


def test_another_type_is_asked_for_when_jobs_would_move_to_it() -> None:
    a, b = pool("a", gpu_type="A100", vms=2, refused=1), pool("b", gpu_type="V100")
    assert choose(4, a, b).counts == {"b": 4}
    assert choose(3, a, b).counts == {}


# ---------------------------------------------------------------- properties

prices = st.floats(0.01, 100.0)
views = st.builds(
    pool,
    st.just(""),
    price=prices,
    speed=st.floats(0.1, 20.0),
    hazard=st.floats(0.0, 5.0),
    vms=st.integers(0, 20),
    most=st.none() | st.integers(0, 30),
    gpu_type=st.sampled_from(["", "A", "B"]),
    gpus=st.sampled_from([1, 4, 8]),
    refused=st.integers(0, 6),
    refused_at=st.floats(NOW - 60.0, NOW),
    closed=st.sampled_from(["", "", "", "it does not answer"]),
)
fleets = st.lists(views, min_size=1, max_size=6).map(
    lambda pools: [replace(one, terms=replace(one.terms, name=f"p{place}")) for place, one in enumerate(pools)]
)
conditions = st.builds(
    PoolConditions,
    join_s=st.floats(0.0, 3600.0),
    stop_s=st.floats(0.0, 100.0),
    budget_per_hour=st.none() | st.floats(0.0, 200.0),
    examples_per_s=st.none() | st.floats(0.1, 1e4),
)


@given(fleets, st.integers(0, 40), conditions)
def test_no_limit_is_ever_broken(pools: list[PoolView], missing: int, given_conditions: PoolConditions) -> None:
    choice = choose_pools(NOW, missing, pools, given_conditions)
    by_name = {one.name: one for one in pools}
    assert sum(choice.counts.values()) <= missing
    for name, count in choice.counts.items():
        asked = by_name[name]
        assert count >= 1
        assert not asked.describe_closure(NOW)
        assert asked.room is None or count <= asked.room
        assert asked.refusals is None or count == 1
    assert len({by_name[name].gpu_type for name in choice.counts}) <= 1
    if given_conditions.budget_per_hour is not None:
        cost = sum(by_name[name].price_per_hour * count for name, count in choice.counts.items())
        assert cost <= given_conditions.budget_per_hour + 1e-6
    assert choice.reason
    assert "\n" not in choice.reason


@given(fleets, st.integers(1, 40))
def test_what_is_missing_is_asked_for_where_that_is_possible(pools: list[PoolView], missing: int) -> None:
    counts = choose_pools(NOW, missing, pools, CONDITIONS).counts
    chosen = [one for one in pools if one.name in counts]
    if not chosen or sum(counts.values()) == missing:
        return
    same = [one for one in pools if one.gpu_type == chosen[0].gpu_type and not one.describe_closure(NOW)]
    for one in same:
        is_probed = one.refusals is not None and counts.get(one.name) == 1
        assert is_probed or counts.get(one.name, 0) == one.room


@given(st.lists(st.integers(0, 10), min_size=2, max_size=5), st.integers(1, 30))
def test_equal_pools_come_as_near_to_equal_numbers_as_they_can(there: list[int], missing: int) -> None:
    pools = [pool(f"p{place}", vms=vms) for place, vms in enumerate(there)]
    counts = choose(missing, *pools).counts
    after = [one.vms + counts.get(one.name, 0) for one in pools]
    grown = [count for one, count in zip(pools, after, strict=True) if one.name in counts]
    assert max(grown) - min(after) <= 1


@given(views, st.integers(1, 100), st.floats(0.0, 10.0), st.floats(1.0, 10.0), conditions)
def test_more_losses_or_a_higher_price_never_make_a_pool_worth_more(
    one: PoolView, vms: int, more: float, dearer: float, given_conditions: PoolConditions
) -> None:
    value = compute_value(one, vms, given_conditions)
    wilder = replace(one, hazard_per_hour=one.hazard_per_hour + more)
    assert compute_value(wilder, vms, given_conditions) <= value
    assert compute_value(replace(one, price_per_hour=one.price_per_hour * dearer), vms, given_conditions) <= value


@given(fleets, st.integers(1, 30), st.floats(0.1, 10.0))
def test_the_currency_does_not_matter(pools: list[PoolView], missing: int, rate: float) -> None:
    """But for ties that rounding breaks: so in powers of two."""
    factor = 2.0 ** round(rate)
    others = [replace(one, price_per_hour=one.price_per_hour * factor) for one in pools]
    counts = choose_pools(NOW, missing, pools, CONDITIONS).counts
    assert choose_pools(NOW, missing, others, CONDITIONS).counts == counts
