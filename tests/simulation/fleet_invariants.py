"""What must hold after every commit, read from the store beside the manager's own connections."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

from simulated_training import Training
from varuna_manager.domain.states import TERMINAL_JOB_STATES

_LIVE_WORKERS = """
    select w.job_id, w.generation, w.rank, w.vm_id, w.local_rank, g.state, v.state
    from workers w join generations g on g.job_id = w.job_id and g.number = w.generation
    left join vms v on v.id = w.vm_id
    where w.state in ('assigned', 'running')
"""


class Invariants:
    """`check` raises AssertionError naming what does not hold."""

    def __init__(self, path: Path, training: Training, now: Callable[[], float]) -> None:
        self._path, self._training, self._now = path, training, now
        self._connection: sqlite3.Connection | None = None
        self._over: dict[str, str] = {}
        self._newest: dict[str, int] = {}
        self._checkpoints: dict[str, int] = {}
        self.checks = 0

    def _read(self, query: str) -> list[tuple[object, ...]]:
        if self._connection is None:
            self._connection = sqlite3.connect(self._path, isolation_level=None)
            # Found in the index alone: a generation's row is large.
            self._connection.execute("create index simulated_generations on generations (job_id, number, state)")
        return self._connection.execute(query).fetchall()

    def check(self) -> None:
        self.checks += 1
        self._jobs()
        self._generations()
        self._workers()

    def _jobs(self) -> None:
        for job_id, state in self._read("select id, state from jobs"):
            before = self._over.get(str(job_id))
            assert before in (None, state), f"job {job_id} was {before} and is {state}"
            if state in TERMINAL_JOB_STATES:
                self._over[str(job_id)] = str(state)

    def _generations(self) -> None:
        rows = self._read(
            "select job_id, max(number), count(*), sum(state != 'ended') from generations group by job_id"
        )
        for job_id, newest, count, live in rows:
            job = str(job_id)
            assert isinstance(newest, int)
            assert isinstance(live, int)
            assert newest == count, f"job {job}: {count} generations, the newest is {newest}"
            assert newest >= self._newest.get(job, 0), f"job {job}: generation {newest} after {self._newest[job]}"
            assert live <= 1, f"job {job} has {live} live generations"
            assert not (live and job in self._over), f"job {job} is {self._over[job]} and has a live generation"
            self._newest[job] = newest
            if job in self._training.jobs:
                self._training.jobs[job].newest_generation = newest

    def _workers(self) -> None:
        devices: dict[tuple[object, object], tuple[object, object]] = {}
        for job_id, generation, rank, vm_id, local_rank, generation_state, vm_state in self._read(_LIVE_WORKERS):
            who = f"rank {rank} of generation {generation} of job {job_id}"
            assert vm_state is not None, f"{who} is on VM {vm_id}, which is not known"
            assert vm_state != "gone", f"{who} is {generation_state} on VM {vm_id}, which is gone"
            if generation_state != "ended":
                other = devices.setdefault((vm_id, local_rank), (job_id, generation))
                assert other == (job_id, generation), f"device {local_rank} of VM {vm_id}: {other} and {who}"

    def at_rest(self) -> None:
        """What must hold when all jobs are over and nothing moves any more."""
        left = self._read(_LIVE_WORKERS)
        assert not left, f"workers that nobody accounted for: {left}"
        for job_id, state in self._read("select id, state from jobs"):
            assert state in TERMINAL_JOB_STATES, f"job {job_id} is still {state}"
        for group in self._training.groups.values():
            alive = [str(m.key) for m in group.members.values() if m.alive]
            assert not alive, f"processes that still run: {alive}"

    def steps_of(self, job_id: str) -> list[int]:
        return [
            int(str(row[0])) for row in self._read(f"select step from metrics where job_id = '{job_id}' order by step")
        ]

    def plan_seconds(self, job_id: str, generation: int) -> float:
        query = (
            "select json_extract(plan, '$.predicted_minibatch_s') from generations "
            f"where job_id = '{job_id}' and number = {generation}"
        )
        return float(str(self._read(query)[0][0]))

    def job_states(self) -> dict[str, str]:
        return {str(job_id): str(state) for job_id, state in self._read("select id, state from jobs")}

    def rendezvous_ports(self) -> list[int]:
        """Of every generation, in the order of their starts."""
        return [int(str(row[0])) for row in self._read("select rendezvous_port from generations order by id")]

    def vm_states(self) -> dict[str, str]:
        return {
            str(vm_id): str(state) for vm_id, state in self._read("select id, state from vms where state != 'gone'")
        }

    def log(self) -> str:
        """The event log, for whoever must find out what went wrong."""
        start = self._read("select min(at) from events")[0][0]
        rows = self._read("select at, kind, job_id, generation, message from events order by id")
        return "\n".join(
            f"{float(str(at)) - float(str(start)):10.2f} {kind:22} {str(job_id or '')[-4:]} g{generation} {message}"
            for at, kind, job_id, generation, message in rows
        )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
