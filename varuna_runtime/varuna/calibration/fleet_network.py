"""The network of the ranks that calibrate: their links, their all-reduces, and what the figures hold for."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from varuna.calibration.links import LinkSample, classify_links, measure_all_reduce, measure_links
from varuna.calibration.peers import CalibrationPeers
from varuna.calibration.rank_types import RankTypes
from varuna.devices.accelerator import is_accelerator
from varuna.devices.cuda_alone import device_model
from varuna_planner.profile.document import AllReduceMeasurement, Links, Profile

__all__ = ["FleetNetwork", "device_name", "measure_network"]


@dataclass
class FleetNetwork:
    """What rank 0 has gathered about the fleet."""

    environment: dict[str, str]
    """What the figures hold for."""
    links: Links
    all_reduce: list[AllReduceMeasurement]

    def add_earlier(self, earlier: Profile) -> None:
        """Adds an earlier profile's larger global batch, and its network if that was measured on more ranks."""
        now, before = self.environment, earlier.environment
        now["global_batch"] = max(now["global_batch"], before.get("global_batch", "1"), key=int)
        across_zones = [links.other_zone for links in (self.links, earlier.links) if links.other_zone is not None]
        if int(before.get("ranks", "0")) > int(now["ranks"]):
            self.links, self.all_reduce = earlier.links, list(earlier.all_reduce)
            now["ranks"], now["hosts"] = before["ranks"], before["hosts"]
            across_zones.reverse()
        if across_zones:  # only one of the two fleets may have been in several zones
            self.links = self.links.model_copy(update={"other_zone": across_zones[0]})


def measure_network(peers: CalibrationPeers, device: torch.device, types: RankTypes) -> FleetNetwork | None:
    """Measures links and all-reduces; returns them on rank 0, None elsewhere. Called by all ranks.

    Without other ranks or connections to them the planner's defaults stand.
    """
    samples: list[LinkSample] = []
    all_reduce: list[AllReduceMeasurement] = []
    places = peers.share_values("places", [peers.host, peers.zone])
    hosts, zones = [host for host, _ in places], [zone for _, zone in places]
    if peers.connect is not None and peers.world_size > 1:
        samples = measure_links(peers.rank, hosts, peers.connect)
        all_reduce = measure_all_reduce(peers.rank, hosts, peers.connect)
    gathered = peers.gather_values("links", [sample.to_json() for sample in samples])
    machines = peers.gather_values("machines", _describe_machine(device))
    if gathered is None or machines is None:
        return None
    links = classify_links([LinkSample.from_json(each) for part in gathered for each in part], hosts, zones)
    environment = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **machines[types.leader],
        "ranks": str(len(hosts)),
        "hosts": ",".join(sorted(set(hosts))),
    }
    return FleetNetwork(environment, links, all_reduce)


def _describe_machine(device: torch.device) -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device_name(device),
        "threads": str(torch.get_num_threads()),
        "cores": str(os.cpu_count()),
    }


def device_name(device: torch.device) -> str:
    """Kind and model of the device, such as `cuda: NVIDIA H200`."""
    if is_accelerator(device):
        return f"{device.type}: {device_model(device)}"
    cpuinfo = Path("/proc/cpuinfo")  # only Linux has it
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{device.type}: {next(names, platform.machine())}"
