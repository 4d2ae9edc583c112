"""`Profiler`: a profile by hand, as the seeds' API has it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import structlog
import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.optim import Optimizer

from varuna._gloo import GlooGroup
from varuna.calibration.measuring import Meters, calibrate, document, measure_network, measure_sections
from varuna.calibration.merging import with_earlier
from varuna.calibration.optimizer import ADAM_MEMORY, OptimizerCosts, OptimizerTime, measure_optimizer, time_optimizer
from varuna.calibration.peers import Peers
from varuna.example_inputs import example_maker
from varuna.generators import global_generators_kept
from varuna.launch import worker_environment
from varuna.optimizers import Optimizers, listed
from varuna.partition import trace
from varuna.precision import Precision
from varuna.worker import Worker, choose_device, make_current
from varuna_planner.profile import Profile

__all__ = ["Profiler", "calibrate"]

_log = structlog.get_logger(__name__)

_PROFILE_FILE = "profile.json"


class Profiler(nn.Module):
    """Profiles a model by the seeds' three steps: wrap it, set the optimizer, `profile_all`.

    Every worker does the same; without a launcher, one process profiles alone. The result is the document that the
    manager's calibration makes, and lies as `profile.json` in `out_folder`.

    Args:
        model: on the CPU (or `meta`), returning its mean loss.
        get_batch: `get_batch(size, device="cpu")` gives example inputs as a dict; or one such dict, of any batch size.
        device: the CUDA device or its index; -1: the local rank's. An index does not matter on CPUs.
        gpus_per_node: ranks per VM, in order of ranks; None: ranks on one host name are on one VM.
        fp16, dtype: the precision of the training, as for `Varuna`.
        out_folder: where the profile is kept.
        pstages_to_profile: sections to measure, the others being taken from the profile in `out_folder`; None: all.
        from_cache: return the profile in `out_folder` when it has all that is asked for.
        add_to_existing: keep the micro-batch sizes of the profile in `out_folder` beside those measured now.
        cut_points: as for `Varuna`.

    Raises:
        ValueError: an argument does not fit the model, or contradicts the launcher.
    """

    def __init__(
        self,
        model: nn.Module,
        get_batch: Callable[..., Mapping[str, Any]] | Mapping[str, Any],
        device: int | str | torch.device | None = -1,
        gpus_per_node: int | None = None,
        fp16: bool = False,
        out_folder: str | Path = "profiles",
        pstages_to_profile: Sequence[int] | None = None,
        from_cache: bool = True,
        add_to_existing: bool = False,
        *,
        dtype: torch.dtype | None = None,
        cut_points: int | None = None,
    ) -> None:
        super().__init__()
        if gpus_per_node is not None and gpus_per_node < 1:
            raise ValueError(f"gpus_per_node {gpus_per_node}: a node has at least one GPU")
        self._model = model
        self._get_batch = example_maker(get_batch)
        self._worker = Worker.join(worker_environment(profiles=True))
        self._device = make_current(choose_device(self._worker.environment, device, -1))
        self._precision = Precision.of(fp16, dtype, self._device)
        self._precision.check_parameters(model.named_parameters())
        self._gpus_per_node = gpus_per_node
        self._path = Path(out_folder) / _PROFILE_FILE
        self._from_cache = from_cache
        self._add_to_existing = add_to_existing
        self._optimizers: tuple[Optimizer, ...] = ()
        self._calls = 0
        with global_generators_kept(self._device), self._precision.dry_run():
            self._model_map = trace(model, self._get_batch(2), cut_points=cut_points)
        count = len(self._model_map.sections)
        self._sections = list(range(count)) if pstages_to_profile is None else sorted(set(pstages_to_profile))
        if any(not 0 <= section < count for section in self._sections):
            raise ValueError(f"pstages_to_profile {self._sections}: the model has sections 0 to {count - 1}")

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's, by their names in it: for making the optimizer."""
        return self._model.named_parameters(prefix, recurse, remove_duplicate)

    def set_optimizer(
        self,
        optimizer: Optimizers,
        amp_opt_level: str = "O2",
        loss_scale: float | Literal["dynamic"] = "dynamic",
        init_loss_scale: float = 2**20,
        min_loss_scale: float | None = None,
    ) -> None:
        """The optimizer, or list of several, that training will use: what it keeps per parameter goes into the profile.

        The other arguments, which cost neither time nor memory, are for the seeds' sake.
        """
        self._optimizers = listed(optimizer)

    def profile_all(self, microbatch_sizes: Sequence[int]) -> Profile:
        """Measure at these micro-batch sizes, all workers together; the whole profile, on every one of them.

        Without `set_optimizer` memory is reckoned for Adam, which keeps two numbers per parameter.
        Raises ValueError when a size is below 1, or a section was measured neither now nor before.
        """
        sizes = sorted(set(microbatch_sizes))
        if not sizes or sizes[0] < 1:
            raise ValueError(f"microbatch_sizes {list(microbatch_sizes)}: give sizes of at least one example")
        environment = self._worker.environment
        self._calls += 1  # each has its own names in the store
        store = PrefixStore(f"profile{self._calls}", self._worker.rendezvous.store)
        peers = Peers(environment.rank, environment.world_size, store)
        before = self._existing() if peers.rank == 0 else None
        enough = self._from_cache and before is not None and set(sizes) <= set(before.micro_batches)
        profile = before if peers.tell("cached", enough) else self._measure(peers, sizes, before)
        told = peers.tell("profile", None if profile is None else profile.to_json())
        peers.part()
        return Profile.from_json(told)

    def _measure(self, peers: Peers, sizes: Sequence[int], before: Profile | None) -> Profile | None:
        """The new profile, kept in the folder, on rank 0; None elsewhere."""
        meters = Meters(self._model, self._model_map, self._device, self._precision)
        mine = self._sections[peers.rank :: peers.world_size]
        found = measure_sections(meters, self._get_batch, peers, mine, sizes, budget_s=60.0, decide=False)
        network = measure_network(peers, self._connect, self._device, self._host())
        if found is None or network is None:
            return None
        found.by_section = with_earlier(
            found.by_section, before, len(self._model_map.sections), every_size=self._add_to_existing
        )
        costs = OptimizerCosts((), [ADAM_MEMORY], [OptimizerTime(0.0, 0.0)])
        if self._optimizers:
            costs = OptimizerCosts(
                self._optimizers,
                [measure_optimizer(each) for each in self._optimizers],
                [time_optimizer(each, self._device, meters.clock).times(found.sharing) for each in self._optimizers],
            )
        profile = document(self._model, self._model_map, found, network, costs, self._precision)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(profile.to_json())
        return profile

    def _connect(self, name: str, ranks: Sequence[int]) -> GlooGroup:
        return self._worker.rendezvous.gloo(f"profile{self._calls}/{name}", ranks)

    def _host(self) -> str:
        if self._gpus_per_node is None:
            return socket.gethostname()
        return f"node{self._worker.environment.rank // self._gpus_per_node}"

    def _existing(self) -> Profile | None:
        """The profile in the folder, if it is of a model with these sections."""
        if not self._path.is_file():
            return None
        try:
            profile = Profile.from_json(self._path.read_text())
        except ValueError as error:
            _log.warning("the earlier profile cannot be read", path=str(self._path), error=str(error))
            return None
        misfit = profile.misfit([section.name for section in self._model_map.sections])
        if misfit is not None:
            _log.warning("the earlier profile is of another model", path=str(self._path), reason=misfit)
            return None
        return profile
