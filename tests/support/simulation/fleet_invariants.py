"""What must hold after every commit, read from the store beside the manager's own connections."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

from simulated_training import SimulatedTraining
from varuna_manager.domain.states import TERMINAL_JOB_STATES

_LIVE_WORKERS = """
    select w.job_id, w.generation, w.rank, w.vm_id, w.local_rank, g.state, v.state
    from workers w join generations g on g.job_id = w.job_id and g.number = w.generation
    left join vms v on v.id = w.vm_id
    where w.state in ('assigned', 'running')
"""

_CHECKPOINTS = """
    select c.job_id, c.generation, min(c.step), max(c.step), g.resumed_step
    from checkpoints c join generations g on g.job_id = c.job_id and g.number = c.generation
    group by c.job_id, c.generation order by c.job_id, c.generation
"""


class Invariants:
    """`check` raises AssertionError naming what does not hold.

    After every commit: a job that is over stays so unless it is retried; a job's generations are numbered without
    gaps, and at most one is live; no device has workers of two jobs, or of two live generations; every worker that has
    not stopped is on a VM that is there; every process belongs to such a worker; each generation's checkpoints begin
    beyond those of the ones before, none is forgotten, and no generation resumes before the newest of them.
    At rest: no worker and no process is left. `simulated_training` checks that an
    older generation completes no step.
    """

    def __init__(self, path: Path, training: SimulatedTraining, now: Callable[[], float]) -> None:
        self._path, self._training, self._now = path, training, now
        self._connection: sqlite3.Connection | None = None
        self._over: dict[str, tuple[str, object]] = {}
        """Jobs that are over: how, and after which generation they were last retried."""
        self._newest: dict[str, int] = {}
        self._checkpoints = 0
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
        self._checkpoints_grow()

    def _jobs(self) -> None:
        for job, state, retried_after in self._read("select id, state, retried_after from jobs"):
            before = self._over.get(str(job))
            if before is not None and (state, retried_after) != before:
                was = before[0]
                is_retried = was != "succeeded" and retried_after == self._newest.get(str(job), 0)
                assert (state, is_retried) == ("queued", True), f"job {job} was {was} and is {state}"
                del self._over[str(job)]
            if state in TERMINAL_JOB_STATES:
                self._over[str(job)] = (str(state), retried_after)

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
            assert not (live and job in self._over), f"job {job} is {self._over[job][0]} and has a live generation"
            self._newest[job] = newest
            if job in self._training.jobs:
                self._training.jobs[job].newest_generation = newest

    def _workers(self) -> None:
        jobs: dict[tuple[object, object], object] = {}
        generations: dict[tuple[object, object], object] = {}
        rows = self._read(_LIVE_WORKERS)
        for job_id, generation, rank, vm_id, local_rank, generation_state, vm_state in rows:
            who = f"rank {rank} of generation {generation} of job {job_id}"
            assert vm_state is not None, f"{who} is on VM {vm_id}, which is not known"
            assert vm_state != "gone", f"{who} is {generation_state} on VM {vm_id}, which is gone"
            device = (vm_id, local_rank)
            assert jobs.setdefault(device, job_id) == job_id, f"device {device}: job {jobs[device]} and {who}"
            if generation_state != "ended":
                other = generations.setdefault(device, generation)
                assert other == generation, f"device {device}: generation {other} and {who}"
        known = {(job_id, generation, rank) for job_id, generation, rank, *_ in rows}
        for worker in self._training.alive():
            key = worker.key
            if worker.left:  # its exit is reported, and nothing of a survivor is in the store
                continue
            assert (key.job_id, key.generation, key.rank) in known, f"{key} runs, and the store does not know of it"

    def _checkpoints_grow(self) -> None:
        written = self._read("select count(*) from checkpoints")[0][0]
        assert isinstance(written, int)
        assert written >= self._checkpoints, f"{self._checkpoints} checkpoints were known, and now {written}"
        if written == self._checkpoints:
            return
        self._checkpoints = written
        newest: dict[object, tuple[object, int]] = {}
        for job, generation, first, last, resumed in self._read(_CHECKPOINTS):
            assert isinstance(first, int)
            assert isinstance(last, int)
            before, saved = newest.get(job, (0, 0))
            who = f"generation {generation} of job {job}"
            assert first > saved, f"{who} saved step {first}, after generation {before} had saved {saved}"
            if resumed is not None:
                assert int(str(resumed)) >= saved, f"{who} resumed at {resumed}: generation {before} had saved {saved}"
            newest[job] = (generation, last)

    def at_rest(self) -> None:
        """What must hold when all jobs are over and nothing moves."""
        left = self._read(_LIVE_WORKERS)
        assert not left, f"workers that nobody accounted for: {left}"
        for job_id, state in self._read("select id, state from jobs"):
            assert state in TERMINAL_JOB_STATES, f"job {job_id} is still {state}"
        alive = [str(worker.key) for worker in self._training.alive()]
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

    def is_moved(self, job_id: str, generation: int) -> bool:
        query = f"select in_place, holders from generations where job_id = '{job_id}' and number = {generation}"
        in_place, holders = self._read(query)[0]
        return bool(in_place) and holders not in (None, "null")

    def all_that_is_decided(self) -> object:
        """What a repeated request must leave as it is."""
        jobs = "select id, state, cancel_saves, retried_after, active_name, history from jobs order by id"
        vms = "select id, state, drain_deadline, notice_id, history from vms order by id"
        fleet = "select provider, target, min_vms, max_vms from fleet"
        return [self._read(query) for query in (jobs, vms, fleet, "select count(*) from events")]

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
        """The event log as text, for finding out what went wrong."""
        start = self._read("select min(at) from events")[0][0]
        rows = self._read("select at, kind, job_id, generation, message from events order by id")
        return "\n".join(
            f"{float(str(at)) - float(str(start)):10.2f} {kind:22} {str(job_id or '')[-4:]} g{generation} {message}"
            for at, kind, job_id, generation, message in rows
        )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
