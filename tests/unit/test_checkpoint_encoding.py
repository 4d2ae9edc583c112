from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varuna.checkpoint import CheckpointError
from varuna.checkpoint.encoding import decode, encode

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.none()
states = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner),
    max_leaves=20,
)


def round_trip(value: Any) -> Any:
    encoded, tensors = encode(value, "x")
    return decode(json.loads(json.dumps(encoded)), tensors)


@given(states)
def test_nested_state_survives_json_with_its_types(state: Any) -> None:
    back = round_trip(state)
    assert back == state
    assert repr(back) == repr(state)


def test_tensors_are_taken_out_by_path_and_put_back() -> None:
    state = {"scale": torch.tensor(3.0), "history": [torch.ones(2), (1, torch.zeros(1, dtype=torch.int64))]}
    encoded, tensors = encode(state, "user")
    assert set(tensors) == {"user/scale", "user/history/0", "user/history/1/1"}
    back = decode(json.loads(json.dumps(encoded)), tensors)
    assert back["scale"] == 3.0
    assert isinstance(back["history"][1], tuple)


def test_a_real_schedulers_state_survives() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 2, 5])
    back = round_trip(scheduler.state_dict())
    assert back == scheduler.state_dict()
    assert isinstance(back["milestones"], Counter)


def test_values_that_json_has_no_word_for_survive() -> None:
    back = round_trip([math.inf, -math.inf, math.nan, 0.1 + 0.2])
    assert back[:2] == [math.inf, -math.inf]
    assert math.isnan(back[2])
    assert back[3] == 0.1 + 0.2


@pytest.mark.parametrize(
    ("state", "path"),
    [({"lr": [print]}, "user/lr/0"), ({"a": {"b": {1, 2}}}, "user/a/b"), ({"z": {(1, 2): 3}}, "user/z")],
)
def test_what_cannot_be_kept_is_named(state: Any, path: str) -> None:
    with pytest.raises(CheckpointError, match=path):
        encode(state, "user")
