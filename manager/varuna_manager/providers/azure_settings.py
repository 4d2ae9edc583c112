"""Settings of the Azure provider: a YAML or TOML file, which the deployment in `deploy/azure` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from varuna_manager.providers.settings_file import read_settings_file


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AzureSize(_Model):
    """One size of VM; a fleet may take several, in order of preference."""

    name: str = Field(description="such as Standard_NC24ads_A100_v4")
    gpus: int = Field(ge=1)
    device_memory_gib: float | None = Field(default=None, gt=0, description="memory of each GPU")
    gpu_type: str = Field(
        default="", max_length=100, description="name of the GPUs, for jobs with a gpu_type; '': not known"
    )
    zones: tuple[str, ...] = Field(default=(), description="availability zones to try, in order; none: Azure's choice")
    price_per_hour: float | None = Field(
        default=None, gt=0, description="of a VM, in US dollars, if Azure gives no spot price"
    )
    accelerated_networking: bool | None = Field(
        default=None, description="null: requested until Azure refuses it for the size"
    )


class AzureSettings(_Model):
    subscription_id: str
    resource_group: str
    location: str
    scale_set: str = Field(default="varuna", pattern=r"^[a-z][a-z0-9-]{0,31}$", description="made if it does not exist")
    sizes: tuple[AzureSize, ...] = Field(min_length=1, description="in order of preference")
    image: str = Field(description="publisher:offer:sku:version, or the id of an image")
    subnet_id: str
    network_security_group_id: str | None = None
    identity_id: str | None = Field(
        default=None, description="user-assigned identity of the VMs, for the checkpoint store"
    )
    admin_username: str = "varuna"
    ssh_public_key: str
    os_disk_gib: int = Field(default=128, ge=30)
    max_price_per_hour: float = Field(default=-1, description="highest price of a VM; -1: up to the on-demand price")
    tags: dict[str, str] = Field(default_factory=dict)
    writes_per_minute: int = Field(default=200, ge=1, description="most requests for VMs per minute")
    list_every_s: float = Field(
        default=2.0, ge=0, description="time between two listings, for each 50 VMs; Azure limits these calls too"
    )
    device: Literal["cuda", "cpu"] = Field(default="cuda", description="device of the VMs' workers")
    pip_options: str = Field(
        default="", pattern=r"^[^'\n]*$", description="options of pip on the VMs, such as the index of PyTorch's wheels"
    )
    retail_prices_url: str = Field(
        default="https://prices.azure.com/api/retail/prices",
        pattern="^(|https?://.*)$",
        description="Azure's public price list, for spot prices that Resource Graph does not give; '': not used",
    )

    @field_validator("image")
    @classmethod
    def _image(cls, value: str) -> str:
        if not value.startswith("/") and value.count(":") != 3:
            raise ValueError("give publisher:offer:sku:version or a resource id that starts with /")
        return value

    @field_validator("sizes")
    @classmethod
    def _all_zoned_or_none(cls, sizes: tuple[AzureSize, ...]) -> tuple[AzureSize, ...]:
        """A scale set with zones takes only VMs with a zone, and one without zones only VMs without."""
        unzoned = [size.name for size in sizes if not size.zones]
        if unzoned and len(unzoned) < len(sizes):
            raise ValueError(
                f"{', '.join(unzoned)} has no zones and others have: a scale set takes either VMs with zones or VMs "
                "without, so give all sizes zones, or none"
            )
        return sizes

    @property
    def scale_set_id(self) -> str:
        return (
            f"/subscriptions/{self.subscription_id}/resourceGroups/{self.resource_group}"
            f"/providers/Microsoft.Compute/virtualMachineScaleSets/{self.scale_set}"
        )


def read_azure_settings(path: Path) -> AzureSettings:
    """Raises ValueError with one line that names the file, the field and the value."""
    return read_settings_file(path, AzureSettings)
