"""How GPUs are shared out among jobs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_manager.domain.sharing import EACH_SIZE, Contender, RatePoint, Share, list_sizes, share_gpus


def rates(most: int, exponent: float = 1.0, first: int = 1) -> tuple[RatePoint, ...]:
    """The rates of a job that needs `first` GPUs and scales with the power `exponent` of their number."""
    return tuple(
        RatePoint(gpus=size, examples_per_s=10.0 * size**exponent) for size in list_sizes(most) if size >= first
    )


def contender(name: str, **changes: object) -> Contender:
    values: dict[str, object] = {"priority": 0, "created_at": float(ord(name[0])), "min_gpus": 1, "max_gpus": None}
    given_ = {**values, **changes}
    return Contender(id=name, name=name, runs=bool(given_.get("has", 0)), **given_)  # type: ignore[arg-type]


def gpus(shares: dict[str, Share]) -> dict[str, int]:
    return {name: given_.gpus for name, given_ in shares.items()}


def test_two_jobs_that_scale_alike_get_alike() -> None:
    jobs = [contender("a", rates=rates(8), has=8), contender("b", rates=rates(8))]
    assert gpus(share_gpus(jobs, 8)) == {"a": 4, "b": 4}


def test_spare_gpus_go_where_they_bring_most() -> None:
    jobs = [contender("a", rates=rates(16, 0.3)), contender("b", rates=rates(16, 0.9))]
    assert gpus(share_gpus(jobs, 16)) == {"a": 4, "b": 12}
    saturated = [contender("a", rates=rates(16)[:3]), contender("b", rates=rates(16, 0.1))]
    assert gpus(share_gpus(saturated, 16)) == {"a": 3, "b": 13}


def test_a_higher_priority_weighs_more_and_comes_first() -> None:
    jobs = [contender("a", rates=rates(12)), contender("b", rates=rates(12), priority=1)]
    assert gpus(share_gpus(jobs, 12)) == {"a": 4, "b": 8}
    jobs = [contender("a", rates=rates(8), has=8, min_gpus=4), contender("b", priority=1, min_gpus=6)]
    shares = share_gpus(jobs, 8)
    assert (shares["a"].gpus, shares["b"].gpus) == (0, 8)
    assert shares["a"].reason == "it needs 4 GPUs and jobs that come first leave 2: b (priority 1)"


def test_the_lowest_priority_gives_way_first() -> None:
    jobs = [
        contender("a", priority=1, min_gpus=4, has=4, max_gpus=4),
        contender("b", priority=0, min_gpus=4, has=4, max_gpus=4),
        contender("c", priority=2, min_gpus=4, max_gpus=4),
    ]
    assert gpus(share_gpus(jobs, 8)) == {"c": 4, "a": 4, "b": 0}


def test_a_job_of_the_same_priority_is_not_stopped_but_gives_up_what_is_spare() -> None:
    jobs = [contender("a", has=8, min_gpus=5, rates=rates(8)), contender("b", min_gpus=4, rates=rates(8))]
    shares = share_gpus(jobs, 8)
    assert gpus(shares) == {"a": 8, "b": 0}
    assert shares["b"].reason == "it needs 4 GPUs and jobs that come first leave 3: a (priority 0)"
    jobs = [contender("a", has=8, min_gpus=5, rates=rates(8)), contender("b", min_gpus=3, rates=rates(8))]
    assert gpus(share_gpus(jobs, 8)) == {"a": 5, "b": 3}


def test_small_jobs_do_not_overtake_a_large_one_that_waits() -> None:
    jobs = [
        contender("a", has=6, min_gpus=6, max_gpus=6),
        contender("b", min_gpus=8),
        contender("c", min_gpus=1),
        contender("d", min_gpus=1, priority=1),
    ]
    shares = share_gpus(jobs, 8)
    assert gpus(shares) == {"a": 6, "b": 0, "c": 0, "d": 2}
    assert shares["c"].reason == "waiting behind job 'b' (priority 0), which needs 8 GPUs"


def test_what_the_fleet_could_never_hold_blocks_nobody() -> None:
    jobs = [contender("b", min_gpus=9), contender("c", min_gpus=1), contender("d", rates=())]
    assert gpus(share_gpus(jobs, 8)) == {"b": 9, "c": 8, "d": 1}


def test_a_jobs_least_is_where_its_model_fits() -> None:
    jobs = [contender("a", rates=rates(8, first=3)), contender("b", rates=rates(8, 0.01))]
    assert gpus(share_gpus(jobs, 4)) == {"a": 3, "b": 1}


def test_running_jobs_keep_what_they_have_unless_a_change_pays() -> None:
    jobs = [contender("a", has=4, rates=rates(8, 0.8)), contender("b", has=4, rates=rates(8))]
    assert gpus(share_gpus(jobs, 8)) == {"a": 4, "b": 4}, "3 and 5 would be a little better"
    lopsided = [contender("a", has=7, rates=rates(8)), contender("b", has=1, rates=rates(8))]
    assert gpus(share_gpus(lopsided, 8)) == {"a": 4, "b": 4}
    dear = [contender("a", has=7, rates=rates(8), worthwhile_ratio=3.0), contender("b", has=1, rates=rates(8))]
    assert gpus(share_gpus(dear, 8)) == {"a": 7, "b": 1}


def test_a_job_that_is_being_cancelled_keeps_what_it_has_and_no_more() -> None:
    jobs = [contender("a", has=3, leaving=True), contender("b", has=1, rates=rates(8))]
    assert gpus(share_gpus(jobs, 8)) == {"a": 3, "b": 5}


def test_large_jobs_get_what_is_between_the_sizes_that_were_asked_for() -> None:
    jobs = [contender("a", rates=rates(1000)), contender("b", rates=rates(1000))]
    assert sum(gpus(share_gpus(jobs, 1000)).values()) == 1000


def test_sizes_are_dense_where_a_gpu_matters() -> None:
    assert list_sizes(5) == (1, 2, 3, 4, 5)
    assert list_sizes(EACH_SIZE) == tuple(range(1, EACH_SIZE + 1))
    assert list_sizes(100)[-5:] == (56, 64, 80, 96) or list_sizes(100)[-4:] == (56, 64, 80, 96)
    assert len(list_sizes(10_000)) < 80


JOBS = st.lists(
    st.builds(
        lambda priority, least, more, has, exponent, profiled, leaving: (
            priority,
            least,
            None if more is None else least + more,
            has,
            exponent if profiled else None,
            leaving,
        ),
        st.integers(-2, 2),
        st.integers(1, 6),
        st.none() | st.integers(0, 6),
        st.integers(0, 6),
        st.floats(0.05, 1.0),
        st.booleans(),
        st.booleans(),
    ),
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(JOBS, st.integers(1, 60))
def test_shares_are_within_the_fleet_and_within_each_jobs_limits(specs: list[tuple], fleet: int) -> None:
    jobs = []
    left = fleet
    for number, (priority, least, most, has, exponent, leaving) in enumerate(specs):
        has = min(has, left, most or has)
        left -= has
        curve = None if exponent is None else rates(min(fleet, most or fleet), exponent)
        jobs.append(
            Contender(
                id=str(number),
                name=str(number),
                priority=priority,
                created_at=float(number),
                min_gpus=least,
                max_gpus=most,
                has=has,
                runs=has > 0,
                rates=curve,
                leaving=leaving,
            )
        )
    shares = share_gpus(jobs, fleet)
    assert set(shares) == {job.id for job in jobs}
    possible = [job for job in jobs if job.leaving or job.least <= fleet]
    assert sum(shares[job.id].gpus for job in possible) <= fleet
    for job in jobs:
        got = shares[job.id].gpus
        if not job.leaving:
            assert got == 0 or job.least <= got <= max(job.most, job.least)
    again = [job if job.leaving else _running(job, shares[job.id].gpus) for job in jobs if shares[job.id].gpus <= fleet]
    if all(job.least <= fleet for job in jobs):
        assert gpus(share_gpus(again, fleet)) == gpus(shares), "what was decided stays decided"


def _running(job: Contender, has: int) -> Contender:
    values = {name: getattr(job, name) for name in job.__dataclass_fields__}
    return Contender(**{**values, "has": has, "runs": has > 0})
