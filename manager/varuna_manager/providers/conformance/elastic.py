"""What a provider must do that makes VMs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from varuna_manager.providers.base import (
    CreatedVms,
    Provider,
    ProviderVm,
    RefusalKind,
    UnknownVmError,
    UnsupportedByProviderError,
)
from varuna_manager.providers.conformance.bench import ProviderBench
from varuna_manager.providers.conformance.running import check_one_line, on_bench, wait_until
from varuna_proto.names import is_plain

__all__ = ["ProviderConformance"]

_NOTICE_S = 3600.0
_TURNS = (0, 1, 2, 5, 20, 100)
"""How many turns of the event loop a request has before its manager ends."""


class ProviderConformance:
    """Subclass it with a name that starts with Test, and implement `open_bench`. At the end of each test, all VMs are
    given back, and then nothing may be left."""

    def open_bench(self, folder: Path) -> AbstractAsyncContextManager[ProviderBench]:
        """A bench without VMs, for one test. `folder` is empty, and the test's own."""
        raise NotImplementedError

    async def check_end(self, bench: ProviderBench) -> None:
        await bench.provider.delete([vm.id for vm in await bench.provider.list()])
        await _wait_for_real_vms(bench, set(), "all VMs were given back")
        assert list(await bench.provider.list()) == []
        assert list(await bench.list_leftovers()) == []

    # ------------------------------------------------------------ VMs

    @on_bench
    async def test_a_provider_has_a_name_an_offer_and_at_first_no_vms(self, bench: ProviderBench) -> None:
        provider = bench.provider
        check_one_line(provider.name)
        assert provider.is_elastic
        assert list(await provider.list()) == []
        assert list(await provider.list_notices()) == []
        offer = await provider.get_offer()
        assert offer.gpus >= 1
        assert offer.price_per_hour is None or offer.price_per_hour >= 0
        assert offer.hazard_per_hour is None or offer.hazard_per_hour >= 0

    @on_bench
    async def test_a_request_makes_as_many_vms_as_it_says_and_each_carries_its_tag(self, bench: ProviderBench) -> None:
        created = await bench.provider.create(3, "request-1")
        _check_whole(created, 3, "request-1")
        listed = await bench.provider.list()
        assert _ids(listed) == _ids(created.vms)
        assert {vm.request for vm in listed} == {"request-1"}
        assert set(await bench.list_real_vms()) == _ids(listed)

    @on_bench
    async def test_two_requests_have_vms_of_their_own(self, bench: ProviderBench) -> None:
        one = await _make_vms(bench.provider, 2, "request-1")
        other = await _make_vms(bench.provider, 1, "request-2")
        assert not one & other
        listed = {vm.id: vm.request for vm in await bench.provider.list()}
        assert listed == {**dict.fromkeys(one, "request-1"), **dict.fromkeys(other, "request-2")}

    @on_bench
    async def test_a_tag_may_be_32_characters_long(self, bench: ProviderBench) -> None:
        """The manager's tags are 32 random hexadecimal digits."""
        tags = ["8f1d0c6e5b7a4923a0e4f2b91c3d5e67", "08192a3b4c5d6e7f8091a2b3c4d5e6f7"]
        one, other = [await _make_vms(bench.provider, 1, tag) for tag in tags]
        assert not one & other
        assert {vm.request for vm in await bench.provider.list()} == set(tags)

    @on_bench
    async def test_the_list_can_be_read_while_vms_are_made(self, bench: ProviderBench) -> None:
        creating = asyncio.create_task(bench.provider.create(3, "request-1"))
        while not creating.done():
            assert {vm.request for vm in await bench.provider.list()} <= {"request-1"}
            await bench.advance()
            await asyncio.sleep(0.001)
        _check_whole(await creating, 3, "request-1")

    @on_bench
    async def test_vms_of_others_are_neither_listed_nor_deleted(self, bench: ProviderBench) -> None:
        stranger = await bench.add_stranger()
        ours = await _make_vms(bench.provider, 1, "request-1")
        assert _ids(await bench.provider.list()) == ours
        if stranger is not None:
            await bench.provider.delete([stranger])
            assert set(await bench.list_real_vms()) == ours

    # ------------------------------------------------------------ requests that are repeated

    @on_bench
    async def test_a_repeated_request_makes_no_vm_twice(self, bench: ProviderBench) -> None:
        first = await _make_vms(bench.provider, 2, "request-1")
        assert await _make_vms(bench.provider, 2, "request-1") == first
        assert set(await bench.list_real_vms()) == first

    @on_bench
    async def test_a_request_can_be_made_for_more_vms(self, bench: ProviderBench) -> None:
        first = await _make_vms(bench.provider, 1, "request-1")
        assert first < await _make_vms(bench.provider, 3, "request-1")
        assert len(await bench.list_real_vms()) == 3

    @on_bench
    async def test_a_request_whose_answer_was_lost_can_be_repeated(self, bench: ProviderBench) -> None:
        await _lose_answer(bench)
        await _make_vms(bench.provider, 3, "request-1")
        assert len(await bench.list_real_vms()) == 3

    @on_bench
    async def test_a_manager_that_starts_again_repeats_a_lost_request(self, bench: ProviderBench) -> None:
        await _lose_answer(bench)
        await bench.restart_provider()
        await _make_vms(bench.provider, 3, "request-1")
        assert len(await bench.list_real_vms()) == 3

    @on_bench
    async def test_a_manager_that_starts_again_finds_its_vms(self, bench: ProviderBench) -> None:
        made = await _make_vms(bench.provider, 2, "request-1")
        await bench.restart_provider()
        listed = await bench.provider.list()
        assert _ids(listed) == made
        assert {vm.request for vm in listed} == {"request-1"}
        assert await _make_vms(bench.provider, 2, "request-1") == made

    @on_bench
    async def test_a_manager_may_end_at_any_moment_of_a_request(self, bench: ProviderBench) -> None:
        for turns in _TURNS:
            request = f"request-{turns}"
            creating = asyncio.create_task(bench.provider.create(2, request))
            for _ in range(turns):
                await asyncio.sleep(0)
            creating.cancel()
            await asyncio.gather(creating, return_exceptions=True)
            await bench.provider.close(end_vms=False)
            await bench.restart_provider()
            made = await _make_vms(bench.provider, 2, request)
            assert {vm.id for vm in await bench.provider.list() if vm.request == request} == made
        assert len(await bench.list_real_vms()) == 2 * len(_TURNS)

    @on_bench
    async def test_a_repeated_request_replaces_a_vm_that_is_gone(self, bench: ProviderBench) -> None:
        first, second = sorted(await _make_vms(bench.provider, 2, "request-1"))
        await bench.take_vm(first, 0.0)
        await _wait_for_listed_vms(bench, {second}, f"{first} was taken")
        again = await bench.provider.create(2, "request-1")
        _check_whole(again, 2, "request-1")
        assert second in _ids(again.vms)
        await _wait_for_real_vms(bench, _ids(again.vms), f"{first} was replaced")

    # ------------------------------------------------------------ refusals

    @on_bench
    async def test_refusals_are_told_apart(self, bench: ProviderBench) -> None:
        assert bench.refusals & {RefusalKind.CAPACITY, RefusalKind.QUOTA}, "a bench must refuse somehow"
        for kind in sorted(bench.refusals):
            await bench.refuse_creations(kind, 0)
            _check_refused(await bench.provider.create(2, f"request-{kind}"), 0, kind)
            assert list(await bench.provider.list()) == []
            assert set(await bench.list_real_vms()) == set()
            await bench.end_refusals()

    @on_bench
    async def test_vms_that_were_made_before_a_refusal_stay(self, bench: ProviderBench) -> None:
        for kind in sorted(bench.refusals & {RefusalKind.CAPACITY, RefusalKind.QUOTA}):
            request = f"request-{kind}"
            await bench.refuse_creations(kind, 1)
            created = await bench.provider.create(3, request)
            _check_refused(created, 1, kind)
            first = _ids(created.vms)
            assert {vm.id for vm in await bench.provider.list() if vm.request == request} == first
            await bench.end_refusals()
            assert first < await _make_vms(bench.provider, 3, request)

    # ------------------------------------------------------------ deletion and preemption

    @on_bench
    async def test_a_deleted_vm_is_going_until_it_leaves_the_list(self, bench: ProviderBench) -> None:
        first, second = sorted(await _make_vms(bench.provider, 2, "request-1"))
        await bench.provider.delete([first])

        async def has_left() -> bool:
            listed = {vm.id: vm for vm in await bench.provider.list()}
            assert not listed[second].going
            assert first not in listed or listed[first].going, f"{first} was deleted, and is listed as if it ran"
            return first not in listed

        await wait_until(bench, has_left, f"{first} leaves the list")
        await _wait_for_real_vms(bench, {second}, f"{first} was deleted")

    @on_bench
    async def test_a_deletion_can_be_repeated_and_ignores_vms_that_are_not_there(self, bench: ProviderBench) -> None:
        first, second = sorted(await _make_vms(bench.provider, 2, "request-1"))
        await bench.provider.delete([])
        await bench.provider.delete(["unknown-vm"])
        await bench.provider.delete([first, "unknown-vm"])
        await bench.provider.delete([first, "unknown-vm"])
        await _wait_for_real_vms(bench, {second}, f"{first} was deleted")
        await bench.provider.delete([first])
        assert _ids(await bench.provider.list()) == {second}

    @on_bench
    async def test_a_manager_that_starts_again_can_delete(self, bench: ProviderBench) -> None:
        first, second = sorted(await _make_vms(bench.provider, 2, "request-1"))
        await bench.restart_provider()
        await bench.provider.delete([first])
        await _wait_for_real_vms(bench, {second}, f"{first} was deleted")

    @on_bench
    async def test_a_vm_that_is_taken_leaves_the_list(self, bench: ProviderBench) -> None:
        first, second = sorted(await _make_vms(bench.provider, 2, "request-1"))
        await bench.take_vm(first, 0.0)
        await _wait_for_listed_vms(bench, {second}, f"{first} was taken")

    @on_bench
    async def test_a_notice_has_its_vm_and_its_deadline(self, bench: ProviderBench) -> None:
        first, second = sorted(await _make_vms(bench.provider, 2, "request-1"))
        before = time.time()
        if not bench.gives_notices:
            assert list(await bench.provider.list_notices()) == []
            return
        await bench.take_vm(first, _NOTICE_S)
        (notice,) = await bench.provider.list_notices()
        assert notice.vm_id == first
        assert notice.id
        assert before < notice.deadline_unix_s <= time.time() + _NOTICE_S
        assert list(await bench.provider.list_notices()) == [notice]
        assert _ids(await bench.provider.list()) == {first, second}
        await bench.restart_provider()
        assert [(again.id, again.vm_id) for again in await bench.provider.list_notices()] == [(notice.id, first)]
        await bench.provider.delete([first])
        await _wait_for_real_vms(bench, {second}, f"{first} was deleted")
        assert list(await bench.provider.list_notices()) == []

    @on_bench
    async def test_an_unknown_vm_cannot_be_preempted(self, bench: ProviderBench) -> None:
        try:
            await bench.provider.preempt_vm("unknown-vm", 0.0)
        except (UnknownVmError, UnsupportedByProviderError) as error:
            check_one_line(str(error))
        else:
            raise AssertionError("no such VM exists, and the provider says that it was preempted")

    # ------------------------------------------------------------ errors and the end

    @on_bench
    async def test_a_service_that_does_not_answer_is_an_error_and_no_empty_list(self, bench: ProviderBench) -> None:
        made = await _make_vms(bench.provider, 2, "request-1")
        await bench.cut_off()
        try:
            listed = await bench.provider.list()
        except Exception as error:
            check_one_line(str(error))
        else:
            raise AssertionError(f"list() answered {listed} without its service: an absent VM counts as gone")
        try:
            created = await bench.provider.create(1, "request-2")
        except Exception as error:
            check_one_line(str(error))
        else:
            _check_refused(created, 0, RefusalKind.FAILED)
        await bench.reconnect()
        await bench.end_refusals()
        assert _ids(await bench.provider.list()) == made

    @on_bench
    async def test_vms_stay_when_the_manager_ends(self, bench: ProviderBench) -> None:
        made = await _make_vms(bench.provider, 2, "request-1")
        await bench.provider.close(end_vms=False)
        assert set(await bench.list_real_vms()) == made
        await bench.restart_provider()
        assert _ids(await bench.provider.list()) == made


async def _make_vms(provider: Provider, count: int, request: str) -> set[str]:
    """Ids of the VMs of a request that is granted."""
    created = await provider.create(count, request)
    _check_whole(created, count, request)
    return _ids(created.vms)


async def _lose_answer(bench: ProviderBench) -> None:
    """Request three VMs, and do not hear the outcome, unless the provider finds it out by itself."""
    await bench.lose_next_answer()
    try:
        created = await bench.provider.create(3, "request-1")
    except Exception as error:
        check_one_line(str(error))
    else:
        if created.refusal is not None:
            check_one_line(created.refusal.reason)
    await bench.reconnect()


async def _wait_for_listed_vms(bench: ProviderBench, ids: Collection[str], what: str) -> None:
    """Wait until the provider lists exactly these VMs, apart from those that are going or have ended."""

    async def is_so() -> bool:
        return {vm.id for vm in await bench.provider.list() if not vm.going and vm.ended is None} == set(ids)

    await wait_until(bench, is_so, what)


async def _wait_for_real_vms(bench: ProviderBench, ids: Collection[str], what: str) -> None:
    """Wait until exactly these VMs exist."""

    async def is_so() -> bool:
        real = set(await bench.list_real_vms())
        assert set(ids) <= real, f"{set(ids) - real} should exist"
        await bench.provider.list()
        return real == set(ids)

    await wait_until(bench, is_so, what)


def _check_whole(created: CreatedVms, count: int, request: str) -> None:
    """The request was granted, and its VMs are in order."""
    assert created.refusal is None
    assert len(created.vms) == len(_ids(created.vms)) == count
    for vm in created.vms:
        assert is_plain(vm.id), f"{vm.id!r} cannot be the name of a folder"
        assert vm.gpus >= 1
        assert vm.request == request
        assert not vm.going
        assert vm.ended is None
        assert vm.created_at <= time.time() + 3600.0, "created_at is in seconds since the epoch"
        assert vm.price_per_hour is None or vm.price_per_hour >= 0


def _check_refused(created: CreatedVms, count: int, kind: RefusalKind) -> None:
    """The request was refused for this reason after so many VMs."""
    assert len(created.vms) == count
    assert created.refusal is not None
    assert created.refusal.kind is kind
    check_one_line(created.refusal.reason)
    assert created.refusal.retry_after_s is None or created.refusal.retry_after_s >= 0


def _ids(vms: Sequence[ProviderVm]) -> set[str]:
    return {vm.id for vm in vms}
