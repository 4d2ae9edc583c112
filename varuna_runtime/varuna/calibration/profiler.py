"""`Profiler`: a profile that a script of the user's own measures."""

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

from varuna.calibration.fleet_network import measure_network
from varuna.calibration.measurements import merge_measurements
from varuna.calibration.optimizer_costs import OptimizerSetup
from varuna.calibration.peers import CalibrationPeers
from varuna.calibration.profile import compare_sections, make_profile, measure_optimizer_costs
from varuna.calibration.section_meters import SectionMeters
from varuna.calibration.sections import measure_sections
from varuna.calibration.subject import CalibrationSubject
from varuna.devices.generators import keep_global_generators
from varuna.devices.worker_device import choose_device, make_device_current
from varuna.distributed.gloo import GlooGroup
from varuna.distributed.worker_environment import read_worker_environment
from varuna.optim.optimizers import Optimizers, list_optimizers
from varuna.optim.precision import TrainingPrecision
from varuna.partition import trace
from varuna.partition.model_io.example_inputs import example_maker
from varuna.worker.worker import WorkerProcess
from varuna_planner.profile.document import Profile

__all__ = ["Profiler"]

_log = structlog.get_logger(__name__)

_PROFILE_FILE = "profile.json"


class Profiler(nn.Module):
    """Profiles a model in three steps: wrap the model, set the optimizer, call `profile_all`.

    Every worker does the same; without a launcher, one process profiles alone. The result is the document that the
    manager's calibration makes. It is also in `out_folder`, as `profile.json`.

    Args:
        model: on the CPU (or `meta`), returning its mean loss.
        get_batch: `get_batch(size, device="cpu")` gives example inputs as a dict; or one such dict, of any batch size.
        device: the CUDA device or its index; -1: the local rank's. An index does not matter on CPUs.
        gpus_per_node: ranks per VM, in order of ranks; None: ranks on one host name are on one VM.
        fp16, dtype: the precision of the training, as for `Varuna`.
        out_folder: the folder of the profile.
        pstages_to_profile: sections to measure; the others come from the profile in `out_folder`. None: all.
        from_cache: return the profile in `out_folder` if it has all these sizes.
        add_to_existing: keep the micro-batch sizes of the profile in `out_folder` beside the new ones.
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
        make_batch = example_maker(get_batch)
        self._worker = WorkerProcess.join_generation(read_worker_environment(profiles=True))
        self._device = make_device_current(choose_device(self._worker.environment, device, -1))
        precision = TrainingPrecision.from_arguments(fp16, dtype, self._device)
        precision.check_parameters(model.named_parameters())
        self._gpus_per_node = gpus_per_node
        self._path = Path(out_folder) / _PROFILE_FILE
        self._from_cache = from_cache
        self._add_to_existing = add_to_existing
        self._optimizers: tuple[Optimizer, ...] = ()
        self._calls = 0
        with keep_global_generators(self._device), precision.dry_run_context():
            model_map = trace(model, make_batch(2), cut_points=cut_points)
        self._subject = CalibrationSubject(model, model_map, make_batch, self._device, precision)
        count = len(model_map.sections)
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
        """Connects the optimizer, or list of several, that training will use, for its memory and time.

        The other arguments cost neither time nor memory, and have no effect.
        """
        self._optimizers = list_optimizers(optimizer)

    def profile_all(self, microbatch_sizes: Sequence[int]) -> Profile:
        """Measures at these micro-batch sizes, all workers together; returns the whole profile on all workers.

        Without `set_optimizer` the profile has the memory of Adam, which keeps two numbers per parameter.
        Raises ValueError when a size is below 1, or a section has neither a new nor an earlier measurement.
        """
        sizes = sorted(set(microbatch_sizes))
        if not sizes or sizes[0] < 1:
            raise ValueError(f"microbatch_sizes {list(microbatch_sizes)}: give sizes of at least one example")
        environment = self._worker.environment
        self._calls += 1  # each call has its own names in the store
        store = PrefixStore(f"profile{self._calls}", self._worker.rendezvous.store)
        peers = CalibrationPeers(
            environment.rank,
            environment.world_size,
            store,
            connect=self._connect,
            host=self._host(),
            gpu_type=environment.gpu_type,
            zone=environment.zone,
        )
        before = self._load_earlier() if peers.rank == 0 else None
        enough = self._from_cache and before is not None and set(sizes) <= set(before.micro_batches)
        profile = before if peers.broadcast_value("cached", enough) else self._measure(peers, sizes, before)
        document = peers.broadcast_value("profile", None if profile is None else profile.to_json())
        peers.wait_for_all()
        return Profile.from_json(document)

    def _measure(self, peers: CalibrationPeers, sizes: Sequence[int], before: Profile | None) -> Profile | None:
        """Returns the new profile on rank 0, where it is also in the folder; None elsewhere."""
        meters = SectionMeters(self._subject)
        types = peers.share_types()
        by_type = measure_sections(
            meters, peers, types, sections=self._sections, sizes=sizes, budget_s=60.0, decide=False
        )
        network = measure_network(peers, self._device, types)
        setup = OptimizerSetup(self._optimizers)
        costs = measure_optimizer_costs(setup, peers, types, self._device, meters.clock)
        if by_type is None or network is None or costs is None:
            return None
        count = len(self._subject.model_map.sections)
        sections = by_type[types.own]
        other_types = compare_sections(by_type, types, before, count)
        sections.by_section = merge_measurements(sections.by_section, before, count, every_size=self._add_to_existing)
        profile = make_profile(
            self._subject,
            sections,
            network,
            costs.scale_times(sections.sharing),
            gpu_type=types.own,
            other_gpu_types=other_types,
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(profile.to_json())
        return profile

    def _connect(self, name: str, ranks: Sequence[int]) -> GlooGroup:
        return self._worker.rendezvous.connect_gloo(f"profile{self._calls}/{name}", ranks)

    def _host(self) -> str:
        if self._gpus_per_node is None:
            return socket.gethostname()
        return f"node{self._worker.environment.rank // self._gpus_per_node}"

    def _load_earlier(self) -> Profile | None:
        """The profile in the folder, if it is one of a model with these sections."""
        if not self._path.is_file():
            return None
        try:
            profile = Profile.from_json(self._path.read_text())
        except ValueError as error:
            _log.warning("the earlier profile cannot be read", path=str(self._path), error=str(error))
            return None
        misfit = profile.describe_misfit([section.name for section in self._subject.model_map.sections])
        if misfit is not None:
            _log.warning("the earlier profile is of another model", path=str(self._path), reason=misfit)
            return None
        return profile
