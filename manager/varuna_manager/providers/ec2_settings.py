"""Settings of the EC2 provider: a YAML or TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from varuna_manager.providers.settings_file import read_settings_file

__all__ = ["Ec2Settings", "read_ec2_settings"]


class Ec2Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    region: str = Field(pattern=r"^[a-z]{2}(-[a-z]+)+-\d+$", description="such as us-east-1")
    fleet: str = Field(
        default="varuna", pattern=r"^[a-z][a-z0-9-]{0,31}$", description="marks this fleet's instances, and names them"
    )
    instance_types: tuple[str, ...] = Field(
        min_length=1, description="all with the same GPUs; AWS chooses among them by allocation_strategy"
    )
    gpus: int = Field(ge=1, description="GPUs of each VM")
    device_memory_gib: float | None = Field(default=None, gt=0, description="memory of each GPU")
    gpu_type: str = Field(
        default="", max_length=100, description="name of the GPUs, for jobs with a gpu_type; '': not known"
    )
    price_per_hour: float | None = Field(
        default=None, gt=0, description="of a VM, in US dollars, if AWS gives no spot price"
    )
    image_id: str = Field(pattern=r"^ami-[0-9a-f]+$", description="an image with cloud-init, systemd and apt")
    subnet_ids: tuple[str, ...] = Field(min_length=1, description="one for each availability zone to use")
    security_group_ids: tuple[str, ...] = Field(min_length=1)
    instance_profile: str | None = Field(
        default=None, description="name or ARN of the instances' profile, for the checkpoint store"
    )
    key_name: str | None = Field(default=None, description="key pair for ssh")
    root_device: str = Field(default="/dev/sda1", description="the image's root device")
    disk_gib: int = Field(default=128, ge=8)
    allocation_strategy: Literal[
        "price-capacity-optimized", "capacity-optimized", "capacity-optimized-prioritized", "lowest-price"
    ] = Field(
        default="price-capacity-optimized", description="how AWS chooses; prioritized: in the order of instance_types"
    )
    max_price_per_hour: float | None = Field(
        default=None, gt=0, description="highest price of a VM; null: up to the on-demand price"
    )
    on_rebalance: Literal["stay", "leave"] = Field(
        default="stay",
        description="what a VM does when AWS says that its risk of an interruption has risen; leave: it is drained and "
        "replaced",
    )
    tags: dict[str, str] = Field(default_factory=dict)
    list_every_s: float = Field(default=2.0, ge=0, description="time between two listings")
    device: Literal["cuda", "cpu"] = Field(default="cuda", description="device of the VMs' workers")
    pip_options: str = Field(
        default="", pattern=r"^[^'\n]*$", description="options of pip on the VMs, such as the index of PyTorch's wheels"
    )


def read_ec2_settings(path: Path) -> Ec2Settings:
    """Raises ValueError with one line that names the file, the field and the value."""
    return read_settings_file(path, Ec2Settings)
