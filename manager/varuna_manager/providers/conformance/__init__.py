"""What every provider must do, as tests that a provider's package runs with pytest.

Subclass `ProviderConformance` (or `FixedProviderConformance`, for a provider that makes no VMs) and `KindConformance`,
and give them a `ProviderBench`: the provider over a fake of its service. docs/writing-a-provider.md shows it.
"""

import pytest

pytest.register_assert_rewrite(f"{__name__}.elastic", f"{__name__}.fixed", f"{__name__}.kinds", f"{__name__}.running")

from varuna_manager.providers.conformance.bench import FixedBench, ProviderBench  # noqa: E402 - after the line above
from varuna_manager.providers.conformance.elastic import ProviderConformance  # noqa: E402
from varuna_manager.providers.conformance.fixed import FixedProviderConformance  # noqa: E402
from varuna_manager.providers.conformance.kinds import KindConformance  # noqa: E402

__all__ = ["FixedBench", "FixedProviderConformance", "KindConformance", "ProviderBench", "ProviderConformance"]
