"""What a provider must do whose set of VMs is fixed."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from varuna_manager.providers.base import UnknownVmError, UnsupportedByProviderError
from varuna_manager.providers.conformance.bench import FixedBench
from varuna_manager.providers.conformance.running import check_one_line, on_bench
from varuna_proto.names import is_plain

__all__ = ["FixedProviderConformance"]


class FixedProviderConformance:
    """Subclass it with a name that starts with Test, and implement `open_bench`."""

    def open_bench(self, folder: Path) -> AbstractAsyncContextManager[FixedBench]:
        """A bench with at least one VM, for one test. `folder` is empty, and the test's own."""
        raise NotImplementedError

    async def check_end(self, bench: FixedBench) -> None:
        await bench.provider.close(end_vms=False)

    @on_bench
    async def test_its_vms_are_listed_from_the_start(self, bench: FixedBench) -> None:
        assert not bench.provider.is_elastic
        check_one_line(bench.provider.name)
        vms = await bench.provider.list()
        assert vms
        assert len({vm.id for vm in vms}) == len(vms)
        for vm in vms:
            assert is_plain(vm.id), f"{vm.id!r} cannot be the name of a folder"
            assert vm.gpus >= 1
            assert not vm.going
            check_one_line(vm.reason_before_hello)
        assert list(await bench.provider.list_notices()) == []
        assert (await bench.provider.get_offer()).gpus >= 1

    @on_bench
    async def test_it_makes_no_vms(self, bench: FixedBench) -> None:
        before = await bench.provider.list()
        created = await bench.provider.create(len(before) + 1, "request-1")
        assert created.refusal is not None
        check_one_line(created.refusal.reason)
        assert {vm.id for vm in await bench.provider.list()} == {vm.id for vm in before}

    @on_bench
    async def test_a_vm_that_is_given_back_stays_in_the_list(self, bench: FixedBench) -> None:
        before = [vm.id for vm in await bench.provider.list()]
        await bench.provider.delete([*before, "unknown-vm"])
        assert [vm.id for vm in await bench.provider.list()] == before

    @on_bench
    async def test_a_vm_is_preempted_only_if_the_provider_can_do_that(self, bench: FixedBench) -> None:
        try:
            await bench.provider.preempt_vm("unknown-vm", 0.0)
        except (UnknownVmError, UnsupportedByProviderError) as error:
            check_one_line(str(error))
        else:
            raise AssertionError("no such VM exists, and the provider says that it was preempted")

    @on_bench
    async def test_a_manager_that_starts_again_finds_the_same_vms(self, bench: FixedBench) -> None:
        before = {vm.id for vm in await bench.provider.list()}
        await bench.restart_provider()
        assert {vm.id for vm in await bench.provider.list()} == before
