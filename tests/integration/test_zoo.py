"""Models as they come from pip train in stages, without an edit, as they do whole. More of them: `make soak-zoo`."""

from __future__ import annotations

import pytest

from zoo import ZOO, table, train_cut_and_whole

pytestmark = pytest.mark.xdist_group("zoo")  # one process imports transformers


@pytest.mark.parametrize("name", ZOO)
def test_a_model_without_cut_points_trains_in_stages_as_it_does_whole(name: str) -> None:
    rows = train_cut_and_whole(name, (2, 3))
    print(table(rows))
    assert all(row.well for row in rows)
    assert all(row.sections >= 3 for row in rows)
