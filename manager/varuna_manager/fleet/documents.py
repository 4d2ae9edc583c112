"""REST documents of VMs."""

from __future__ import annotations

from collections.abc import Sequence

from varuna_manager.answers.documents import format_time
from varuna_manager.db.models import VmRow
from varuna_manager.fleet.workers import ListedWorker
from varuna_manager.jobs.documents import make_worker_document
from varuna_manager.world.vm_registry import Health
from varuna_proto.rest_fleet import VmDocument


def make_vm_document(
    vm: VmRow,
    workers: Sequence[ListedWorker],
    last_heard_s: float | None,
    healths: Sequence[Health] = (),
    held_bytes: int = 0,
) -> VmDocument:
    """`workers`: those on the VM that have not stopped. `healths`, `held_bytes`: from its last heartbeat."""
    by_rank = {health.key: health for health in healths} if workers else {}
    documents = [make_worker_document(w, w.job_name, by_rank.get((w.job_id, w.generation, w.rank))) for w in workers]
    return {
        "id": vm.id,
        "provider": vm.provider,
        "state": vm.state,
        "gpus": vm.gpus,
        "device_memory_bytes": vm.device_memory_bytes,
        "gpu_type": vm.gpu_type,
        "host": vm.host,
        "ref": vm.ref,
        "generation": max((worker.generation for worker in workers), default=None),
        "workers": documents,
        "held_bytes": held_bytes,
        "last_heard_s": last_heard_s,
        "created_at": format_time(vm.created_at),
        "reason": vm.reason,
        "slow_ratio": vm.slow_ratio,
        "slow_reason": vm.slow_reason,
        "quarantined_until": format_time(vm.quarantined_until),
        "quarantines": vm.quarantines,
        "notice_deadline": format_time(vm.notice_deadline),
        "drain_deadline": format_time(vm.drain_deadline),
        "cordoned_at": format_time(vm.cordoned_at),
        "hangs": vm.hangs,
        "price_per_hour": vm.price_per_hour,
        "pool": vm.pool,
        "zone": vm.zone,
        "machine_type": vm.machine_type,
    }
