from __future__ import annotations

import json
import math
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varuna.checkpoint import CheckpointError
from varuna.checkpoint.format.encoding import decode_state, encode_state

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.none()
states = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner),
    max_leaves=20,
)


def round_trip(value: Any) -> Any:
    encoded, tensors = encode_state(value, "x")
    return decode_state(json.loads(json.dumps(encoded)), tensors)


@given(states)
def test_nested_state_survives_json_with_its_types(state: Any) -> None:
    back = round_trip(state)
    assert back == state
    assert repr(back) == repr(state)


def test_tensors_are_taken_out_by_path_and_put_back() -> None:
    state = {"scale": torch.tensor(3.0), "history": [torch.ones(2), (1, torch.zeros(1, dtype=torch.int64))]}
    encoded, tensors = encode_state(state, "user")
    assert set(tensors) == {"user/scale", "user/history/0", "user/history/1/1"}
    back = decode_state(json.loads(json.dumps(encoded)), tensors)
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
        encode_state(state, "user")


@pytest.mark.parametrize(
    "number",
    [
        (1 - 1.0001) ** 0.5,  # a learning rate of NVIDIA's BERT beyond its last step
        complex(math.inf, -0.0),
        np.float32(0.1),
        np.float64(0.1),
        np.float16(math.inf),
        np.longdouble("0.1"),
        np.int64(-3),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.complex64(1 + 2j),
        np.clongdouble(1 + 2j),
        Fraction(1, 3),
        Decimal("0.1"),
        Decimal("-Infinity"),
        2**70,
        -(7**20_000),  # of more digits than Python prints
    ],
    ids=lambda number: f"{type(number).__name__}",
)
def test_every_kind_of_number_survives_with_its_type(number: Any) -> None:
    back = round_trip({"lr": number, number: [number]})
    assert back == {"lr": number, number: [number]}
    assert type(back["lr"]) is type(number)


@pytest.mark.parametrize("kind", ["float64", "uint32", "longdouble", "bool", "complex128", ">i2"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_arrays_of_numbers_survive(kind: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(kind)[..., ::-1] if shape else np.array(1, dtype=kind)
    back = round_trip({"keys": array})["keys"]
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)
    back[...] = 0  # memory of its own, which can be written


def test_the_random_states_that_samplers_keep_survive() -> None:
    legacy = np.random.RandomState(5)
    state = legacy.get_state()
    expected = legacy.random()
    legacy.set_state(round_trip(state))
    assert legacy.random() == expected
    generator = np.random.default_rng(5)
    expected_state = generator.bit_generator.state
    expected = generator.random()
    generator.bit_generator.state = round_trip(expected_state)
    assert generator.random() == expected


def test_an_array_of_objects_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"user/a is an array of object"):
        encode_state({"a": np.array([print])}, "user")


@pytest.mark.parametrize("encoded", [{"$complex": [1]}, {"$fraction": "x"}, {"$numpy": ["no", 1]}, {"$int": "z"}])
def test_a_number_that_nobody_wrote_is_malformed(encoded: Any) -> None:
    with pytest.raises(CheckpointError, match="malformed"):
        decode_state(encoded, {})
