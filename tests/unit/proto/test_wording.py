"""Numbers in messages read as a person would write them."""

from __future__ import annotations

import pytest

from varuna_proto.wording import count_are, count_of, render_bytes, render_interval, render_rate


def test_one_is_no_plural() -> None:
    assert [count_of(number, "GPU") for number in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]
    assert [count_are(number, "GPU") for number in (1, 2)] == ["1 GPU is", "2 GPUs are"]


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1945, "1.9 KiB"), (48 * 2**20, "48.0 MiB"), (2**50, "1024.0 TiB")],
)
def test_few_bytes_are_not_nothing(count: int, shown: str) -> None:
    assert render_bytes(count) == shown


@pytest.mark.parametrize(
    ("rate", "shown"), [(0.0421, "0.0421"), (8.0, "8"), (16.0, "16.0"), (820.52, "820.5"), (12595.02, "12595")]
)
def test_a_rate_has_three_digits_at_least(rate: float, shown: str) -> None:
    assert render_rate(rate) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(45, "45 s"), (119, "119 s"), (720, "12 min"), (36_108, "10 h"), (300_000, "3 days")]
)
def test_an_interval_has_the_unit_that_fits(seconds: float, shown: str) -> None:
    assert render_interval(seconds) == shown
