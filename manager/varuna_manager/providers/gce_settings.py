"""Settings of the GCE provider: a YAML or TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from varuna_manager.providers.settings_file import read_settings_file

__all__ = ["GceSettings", "read_gce_settings"]


class GceSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    project: str = Field(pattern=r"^[a-z][a-z0-9-]{4,29}$", description="id of the project")
    zones: tuple[str, ...] = Field(min_length=1, description="such as us-central1-a, in order of preference")
    fleet: str = Field(
        default="varuna", pattern=r"^[a-z][a-z0-9-]{0,31}$", description="marks this fleet's instances, and names them"
    )
    machine_types: tuple[str, ...] = Field(
        min_length=1, description="in order of preference, all with the same GPUs, such as a2-highgpu-8g"
    )
    gpus: int = Field(ge=1, description="GPUs of each VM")
    accelerator: str = Field(
        default="", description="type of GPU to attach, such as nvidia-tesla-t4; '': the machine type has its GPUs"
    )
    device_memory_gib: float | None = Field(default=None, gt=0, description="memory of each GPU")
    gpu_type: str = Field(
        default="", max_length=100, description="name of the GPUs, for jobs with a gpu_type; '': not known"
    )
    price_per_hour: float | None = Field(default=None, gt=0, description="of a VM, in US dollars; null: not known")
    image: str = Field(
        pattern=r"^projects/[^/]+/global/images/",
        description="projects/PROJECT/global/images/family/FAMILY, or an image",
    )
    subnetwork: str = Field(
        pattern=r"^projects/[^/]+/regions/[^/]+/subnetworks/",
        description="projects/PROJECT/regions/REGION/subnetworks/NAME",
    )
    network_tags: tuple[str, ...] = Field(default=(), description="for the rules of the firewall")
    service_account: str | None = Field(
        default=None, description="email of the instances' service account, for the checkpoint store"
    )
    disk_gib: int = Field(default=128, ge=10)
    disk_type: str = "pd-balanced"
    labels: dict[str, str] = Field(default_factory=dict)
    list_every_s: float = Field(default=2.0, ge=0, description="time between two listings")
    device: Literal["cuda", "cpu"] = Field(default="cuda", description="device of the VMs' workers")
    pip_options: str = Field(
        default="", pattern=r"^[^'\n]*$", description="options of pip on the VMs, such as the index of PyTorch's wheels"
    )


def read_gce_settings(path: Path) -> GceSettings:
    """Raises ValueError with one line that names the file, the field and the value."""
    return read_settings_file(path, GceSettings)
