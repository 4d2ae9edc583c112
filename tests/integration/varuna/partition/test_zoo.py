"""Models from pip train in stages as they do whole, without an edit. `make soak-zoo` has more of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from repository import ROOT
from zoo import ARTIFACT, ZOO, ZooResult, as_expected, table, train_cut_and_whole
from zoo_models import CHEAP, MODELS

pytestmark = [pytest.mark.xdist_group("zoo"), pytest.mark.slow]  # one process imports transformers


@pytest.fixture(scope="module")
def rows() -> Iterator[list[ZooResult]]:
    """Of all models; left in test-artifacts/zoo.txt."""
    made: list[ZooResult] = []
    yield made
    ARTIFACT.parent.mkdir(exist_ok=True)
    ARTIFACT.write_text(table(made) + "\n")


@pytest.mark.parametrize("name", CHEAP)
def test_a_model_without_cut_points_trains_in_stages_as_it_does_whole(name: str, rows: list[ZooResult]) -> None:
    made = train_cut_and_whole(name, (2, 3))
    rows += made
    print(table(made))
    assert as_expected(MODELS[name], made)
    assert MODELS[name].refused or all(row.sections >= 3 for row in made)


def test_the_page_of_models_has_all_of_the_zoo() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    shown = re.findall(r"^\| ([^|]+) \| \d* \|.*\| ([^|]*) \|$", page, re.MULTILINE)
    assert [name for name, _ in shown] == list(ZOO)
    assert [name for name, status in shown if status != "equal"] == [name for name in ZOO if ZOO[name].refused]
