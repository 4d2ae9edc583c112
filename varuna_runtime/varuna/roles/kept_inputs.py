"""The inputs of the step under way, where no process can make them again: the script has a loader of its own.

Survivors can still end the step. The micro-batches that are run again were a lost replica's, and its other ranks have
the same inputs. They give them, even if they have no rank in the next generation. The loader goes on with batches for
the shape before, so after the step new processes must take the state.

Letters: P stages, D replicas; rank = replica * P + stage.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from varuna.checkpoint.format.tensor_file import DTYPES
from varuna.distributed.handshake import MeetingKey
from varuna.distributed.rendezvous_store import read_values
from varuna.distributed.topology import share_of_batch, spans_of_micro_batches
from varuna.holdings.step_inputs import InputsPlace, InputsServer, fetch_inputs
from varuna.partition.model_io.batch import batch_size_of
from varuna.pipeline.micro_batches import cut_inputs, join_spans, split_spans
from varuna.roles.kept_shares import StepRest
from varuna.worker.worker import WorkerProcess
from varuna_planner.schedule.batching import count_micro_batches
from varuna_proto.environment import WorkerEnvironment

__all__ = ["KeptInputs"]

_log = structlog.get_logger("varuna")

_LEAST_STEP_S = 10.0
"""In shorter steps, a generation for the rest of the step costs about as much as it saves: some three seconds."""


class _Giver(NamedTuple):
    """One rank that gives inputs, as the other ranks know it."""

    address: str
    """`host:port`; empty: it gives none."""
    vm: str
    """Equal for ranks on one VM."""
    numbers: Sequence[Sequence[int]]
    """The micro-batches whose inputs it has, as runs [first, end)."""
    obstacle: str = ""
    """Why this rank cannot end the step under way; empty: it can."""

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> _Giver:
        return cls(**json.loads(text))


class KeptInputs:
    """What this process has of the inputs of the step under way, and which processes have the others."""

    def __init__(self) -> None:
        self._servers: list[InputsServer] = []
        """One for each generation of this process, the newest last. The earlier ones serve ranks that come later."""
        self._generation = 0
        """The generation of the newest server."""
        self._givers: Sequence[_Giver] = ()
        """By rank of that generation; empty: not known yet."""
        self._places: list[InputsPlace] = []
        """All that may have inputs of the step under way, also those of earlier generations."""
        self._p = 1
        self._step = 0
        self._held: dict[int, list[Tensor]] = {}
        """By micro-batch of that step: the tensors of its inputs."""
        self._micro_batch = 0
        """Examples in each micro-batch, of this step or the one before; 0: none have been held."""
        self._is_long = False
        self._has_given_up = False

    @property
    def can_end_step(self) -> bool:
        """Whether survivors may end the step under way.

        They cannot where all ranks of a replica are on one VM: if that is lost, nobody has the replica's inputs.
        """
        if self._has_given_up or not (self._held and self._is_long and self._givers):
            return False
        replicas = [self._givers[first : first + self._p] for first in range(0, len(self._givers), self._p)]
        return all(len({giver.vm for giver in replica}) > 1 for replica in replicas)

    @property
    def has_given_up(self) -> bool:
        return self._has_given_up

    def give_up(self) -> None:
        """This process ends no further step with inputs of others."""
        self._has_given_up = True

    def hold_share(self, worker: WorkerProcess, step: int, inputs: Mapping[str, Any], micro_batch_s: float) -> None:
        """From now on gives these inputs of `step`, which are the share of this rank's replica.

        `micro_batch_s`: how long a micro-batch took in the step before; 0: it is not known.
        """
        self._step, self._p = step, worker.topology.p
        self._held = _cut_share(inputs, worker.environment)
        self._micro_batch = worker.environment.plan.micro_batch
        self._is_long = micro_batch_s * len(self._held) >= _LEAST_STEP_S
        if not self._held or self._has_given_up:
            return
        if self._generation != worker.environment.generation:
            self._start_server(worker)
            giver = self._describe_own(worker)
            with suppress(dist.DistError):  # rank 0 is gone, which this worker learns otherwise
                worker.rendezvous.store.set(_giver_key(worker.topology.rank), giver.to_json())
        elif not self._givers:
            texts = read_values(worker.rendezvous.store, [_giver_key(rank) for rank in worker.topology.everyone])
            self._add_givers(worker, texts or ())
        if self._servers:
            self._servers[-1].hold_inputs(step, self._held)

    def forget_inputs(self) -> None:
        """The state is another one: a step of the same number may get other inputs."""
        self._held = {}
        for server in self._servers:
            server.hold_inputs(self._step, {})

    def gather_inputs(self, worker: WorkerProcess, step: int, rest: StepRest, inputs: Mapping[str, Any]) -> str:
        """Gets what this rank lacks of the inputs of the rest of `step`. All ranks of a generation call it.

        `inputs`: of the call of `step` that is under way here. Returns why the ranks cannot end the step; empty: they
        can.
        """
        obstacle = ""
        if step != self._step:  # the call has only just begun here
            self._step, self._held = step, {}
        try:
            if self._micro_batch not in (0, rest.micro_batch):  # each process gives inputs by whole micro-batches
                raise ValueError("the micro-batches are others")
            fetched = fetch_inputs(self._places, step, [number for number in rest.numbers if number not in self._held])
            _check_alike(inputs, [*self._held.values(), *fetched.values()])
        except ValueError as error:
            obstacle = str(error)
        else:
            self._held |= fetched
        self._p = worker.topology.p
        self._start_server(worker)
        if self._servers:
            self._servers[-1].hold_inputs(step, self._held)
        own = self._describe_own(worker, obstacle)
        texts = worker.rendezvous.exchange_values("inputs", worker.topology.everyone, own.to_json())
        self._add_givers(worker, texts)
        return next((giver.obstacle for giver in self._givers if giver.obstacle), "")

    def join_inputs(self, numbers: Sequence[int], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of these micro-batches, one after the other. `inputs`: of the same structure."""
        if not numbers:
            return {}
        structure = tree_flatten(dict(inputs))[1]
        leaves = zip(*(self._held[number] for number in numbers), strict=True)
        joined: dict[str, Any] = tree_unflatten([torch.cat([one.cpu() for one in leaf]) for leaf in leaves], structure)
        return joined

    def _start_server(self, worker: WorkerProcess) -> None:
        """Starts to give inputs to the processes of the worker's generation, and to those that follow."""
        self._generation, self._givers = worker.environment.generation, ()
        try:
            server = InputsServer(MeetingKey.from_environment(worker.environment), worker.rendezvous.own_address())
        except OSError as error:
            _log.warning("this process gives no inputs to others: it gets no port", reason=str(error))
        else:
            self._servers.append(server)

    def _describe_own(self, worker: WorkerProcess, obstacle: str = "") -> _Giver:
        vm = f"{worker.rendezvous.own_address()}/{zlib.crc32(worker.environment.agent_socket.encode())}"
        address = self._servers[-1].address if self._servers else ""
        return _Giver(address, vm, join_spans(self._held), obstacle)

    def _add_givers(self, worker: WorkerProcess, texts: Sequence[str]) -> None:
        self._givers = [_Giver.from_json(text) for text in texts]
        key = MeetingKey.from_environment(worker.environment)
        self._places += [
            InputsPlace(giver.address, key, frozenset(split_spans(giver.numbers)))
            for giver in self._givers
            if giver.address
        ]


def _giver_key(rank: int) -> str:
    return f"inputs/address/{rank}"


def _cut_share(inputs: Mapping[str, Any], environment: WorkerEnvironment) -> dict[int, list[Tensor]]:
    """By micro-batch: the tensors of its inputs; empty if others cannot use them, or never need them.

    They can use whole shares, of inputs that have nothing but tensors with one row for each example.
    """
    plan, replica = environment.plan, environment.rank // environment.plan.p
    if plan.p < 2 or plan.d < 2 or not plan.global_batch:
        return {}
    batch = batch_size_of(inputs)
    if not all(_is_batched(leaf, batch) for leaf in tree_flatten(dict(inputs))[0]):
        return {}
    sizes, first = share_of_batch(batch, environment, replica)
    is_last = replica == plan.d - 1
    end = (
        count_micro_batches(plan.global_batch, plan.micro_batch)
        if is_last
        else share_of_batch(batch, environment, replica + 1)[1]
    )
    spans = spans_of_micro_batches(range(first, end), plan.micro_batch, plan.global_batch)
    planned = [len(span) for span in spans.values()]
    if list(sizes) != planned:
        return {}
    return {piece.index: tree_flatten(piece.inputs)[0] for piece in cut_inputs(inputs, sizes, first)}


def _is_batched(leaf: Any, batch: int) -> bool:
    is_dense = isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.dtype in DTYPES.values()
    return is_dense and leaf.dim() > 0 and leaf.shape[0] == batch


def _check_alike(inputs: Mapping[str, Any], pieces: Sequence[Sequence[Tensor]]) -> None:
    """Raises ValueError if the inputs of micro-batches cannot be joined to inputs such as these."""
    own = [(leaf.dtype, leaf.shape[1:]) if isinstance(leaf, Tensor) else None for leaf in tree_flatten(dict(inputs))[0]]
    for piece in pieces:
        if [(tensor.dtype, tensor.shape[1:]) for tensor in piece] != own:
            raise ValueError("the inputs of replicas have other shapes")
