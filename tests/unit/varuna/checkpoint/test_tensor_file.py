"""Our safetensors files are the library's, and the other way round."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from varuna.checkpoint.format import tensor_file

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]
SHAPES = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.dictionaries(st.text(min_size=1, max_size=5), st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=5)


def make(shapes: dict[str, tuple[torch.dtype, list[int]]]) -> dict[str, Tensor]:
    return {name: (torch.rand(shape) * 3).to(dtype) for name, (dtype, shape) in shapes.items()}


@given(TENSORS.filter(lambda shapes: "__metadata__" not in shapes))
def test_the_library_reads_what_is_written_and_the_other_way_round(
    shapes: dict[str, tuple[torch.dtype, list[int]]],
) -> None:
    tensors = make(shapes)
    written = b"".join(tensor_file.iterate_pieces(tensors, {"key": "value"}))
    for read in (safetensors.torch.load(written), tensor_file.read_tensors(bytearray(written))[0]):
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor)
    theirs, metadata = tensor_file.read_tensors(bytearray(safetensors.torch.save(tensors, metadata={"key": "value"})))
    assert metadata == {"key": "value"}
    assert all(torch.equal(theirs[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "data", [b"", b"1234567", b"\xff" * 16, b"\x02" + b"\0" * 7 + b"[]", b"\x09" + b"\0" * 7 + b'{"a": {}}']
)
def test_what_is_no_such_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"bytes|header"):
        tensor_file.read_tensors(bytearray(data))


def test_a_tensor_outside_its_file_is_refused() -> None:
    written = b"".join(tensor_file.iterate_pieces({"a": torch.ones(4)}, {}))
    with pytest.raises(ValueError, match=r"a \[4\] does not lie within the file"):
        tensor_file.read_tensors(bytearray(written[:-1]))
