"""These tests make real VMs, which cost money: they run only with a settings file.

VARUNA_AZURE_LIVE names a settings file of the Azure provider (docs/azure.md). Its sizes[0] should be a cheap one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from varuna_manager.providers.azure_settings import AzureSettings, read_azure_settings

VARIABLE = "VARUNA_AZURE_LIVE"


@pytest.fixture(scope="session")
def live_settings() -> AzureSettings:
    """The settings; skips where there are none."""
    path = os.environ.get(VARIABLE)
    if not path:
        pytest.skip(f"{VARIABLE} is not set: it names a settings file of the Azure provider (see docs/azure.md)")
    settings = read_azure_settings(Path(path))
    # A scale set of its own: nothing may delete VMs of the fleet's real one.
    return settings.model_copy(update={"scale_set": f"{settings.scale_set[:20]}-livetest", "list_every_s": 1.0})
