"""What a dry run remembers of an operation on fake tensors, against what torch gives for the same operation again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from varuna.partition.tracing.fake_results import FakeResults
from varuna.partition.tracing.operation_calls import OperationCall, storage_of, tensors_in

aten = torch.ops.aten
Run = Callable[..., Any]


class CountingMode(FakeTensorMode):
    """Counts how often it is entered: at least once for what is not remembered."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.entered = 0

    def __enter__(self) -> CountingMode:
        self.entered += 1
        super().__enter__()
        return self


@pytest.fixture
def mode() -> CountingMode:
    return CountingMode()


@pytest.fixture
def fake(mode: CountingMode) -> Callable[..., Tensor]:
    def make(*shape: int, dtype: torch.dtype = torch.float32, stride: tuple[int, ...] | None = None) -> Tensor:
        given = torch.empty(shape, dtype=dtype, device="meta")
        if stride is not None:
            given = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(mode, given, torch.device("cpu"))

    return make


@pytest.fixture
def run(mode: CountingMode) -> Run:
    results = FakeResults(mode)

    def run_operation(func: Any, *args: Any, **kwargs: Any) -> Any:
        return results.run(OperationCall(func, args, kwargs, tensors_in((args, kwargs))))

    return run_operation


def describe(result: Any, given: list[Tensor]) -> Any:
    """All that can be seen of a result, and which of the tensors given has its memory."""
    memory = [storage_of(tensor) for tensor in given]
    return type(result), [
        (
            type(x),
            x.shape,
            x.stride(),
            x.dtype,
            x.device,
            x.storage_offset(),
            x.requires_grad,
            x.untyped_storage().nbytes(),
            memory.index(storage_of(x)) if storage_of(x) in memory else None,
        )
        for x in tensors_in(result)
    ]


OPERATIONS: dict[str, tuple[Any, Callable[[Callable[..., Tensor]], tuple[Any, ...]]]] = {
    "own memory": (aten.add.Tensor, lambda fake: (fake(2, 3), fake(3))),
    "other strides": (aten.add.Tensor, lambda fake: (fake(2, 3, stride=(1, 2)), fake(2, 3, stride=(1, 2)))),
    "a number": (aten.mul.Tensor, lambda fake: (fake(2, dtype=torch.int64), 2.0)),
    "a view": (aten.view.default, lambda fake: (fake(2, 3, 4), [6, 4])),
    "a transposed view": (aten.t.default, lambda fake: (fake(2, 3),)),
    "a view with an offset": (aten.select.int, lambda fake: (fake(2, 3), 0, 1)),
    "no elements": (aten.slice.Tensor, lambda fake: (fake(2, 3), 0, 2, 2)),
    "an unsafe view": (aten._unsafe_view.default, lambda fake: (fake(2, 3), [3, 2])),
    "several views": (aten.split.Tensor, lambda fake: (fake(5, 3), 2)),
    "several tensors": (aten.native_layer_norm.default, lambda fake: (fake(2, 3), [3], fake(3), fake(3), 1e-5)),
    "a list of tensors": (aten.cat.default, lambda fake: ([fake(2, 3), fake(1, 3)],)),
    "rows by index": (aten.index.Tensor, lambda fake: (fake(5, 3), [None, fake(2, dtype=torch.int64)])),
    "a product": (aten.addmm.default, lambda fake: (fake(4), fake(2, 3), fake(3, 4))),
    "another type": (aten._to_copy.default, lambda fake: (fake(2, 3),)),
    "three tensors": (aten.where.self, lambda fake: (fake(2, dtype=torch.bool), fake(2), fake(2))),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_remembered_result_is_as_torch_gives_it(name: str, mode: CountingMode, fake: Any, run: Run) -> None:
    func, arguments = OPERATIONS[name]
    run(func, *arguments(fake))
    args = arguments(fake)
    given = tensors_in(args)
    with mode:
        expected = func(*args)
    asked = mode.entered
    assert describe(run(func, *args), given) == describe(expected, given)
    assert mode.entered == asked, "it was not remembered"


def test_results_are_new_tensors_with_memory_of_their_own(fake: Any, run: Run) -> None:
    one, other = (run(aten.add.Tensor, fake(2), fake(2)) for _ in range(2))
    assert one is not other
    assert storage_of(one) != storage_of(other)


@pytest.mark.parametrize(
    ("first", "second"),
    [(2, 2.0), (True, 1), (1.0, True)],
    ids=["int and float", "bool and int", "float and bool"],
)
def test_equal_numbers_of_other_types_are_other_arguments(first: Any, second: Any, fake: Any, run: Run) -> None:
    """1 == 1.0 == True, but what a tensor of integers becomes by them differs."""
    x = fake(2, dtype=torch.bool)
    assert run(aten.mul.Tensor, x, first).dtype is not run(aten.mul.Tensor, x, second).dtype


def test_numbers_become_tensors_of_the_default_type_of_the_moment(fake: Any, run: Run) -> None:
    x = fake(2, dtype=torch.int64)
    one = run(aten.div.Tensor, x, 2)
    torch.set_default_dtype(torch.float64)
    try:
        other = run(aten.div.Tensor, x, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (one.dtype, other.dtype) == (torch.float32, torch.float64)


def test_strides_and_offsets_are_told_apart(fake: Any, run: Run) -> None:
    strides = [run(aten.relu.default, fake(2, 3, stride=stride)).stride() for stride in ((3, 1), (1, 2))]
    assert strides == [(3, 1), (1, 2)]
    x = fake(4)
    rows = [run(aten.slice.Tensor, x, 0, start, start + 2) for start in (0, 2)]
    assert [run(aten.select.int, row, 0, 1).storage_offset() for row in rows] == [1, 3]


def test_keywords_are_arguments(fake: Any, run: Run) -> None:
    x = fake(2)
    made = [run(aten._to_copy.default, x, dtype=dtype).dtype for dtype in (torch.float16, torch.float64) * 2]
    assert made == [torch.float16, torch.float64] * 2


def test_errors_come_each_time(fake: Any, run: Run) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="2, 3"):
            run(aten.mm.default, fake(2, 3), fake(2, 3))


def test_what_changes_a_tensor_is_never_remembered(mode: CountingMode, fake: Any, run: Run) -> None:
    for _ in range(2):
        x = fake(2)
        asked = mode.entered
        assert run(aten.add_.Tensor, x, 1) is x
        assert mode.entered > asked


def test_custom_operators_are_asked_each_time(mode: CountingMode, fake: Any, run: Run) -> None:
    """What they make may depend on more than their arguments."""
    sizes = iter((2, 3))

    @torch.library.custom_op("varuna_tests::grows", mutates_args=())
    def grows(x: Tensor) -> Tensor:
        return x.clone()

    grows.register_fake(lambda x: x.new_empty(next(sizes)))
    func = torch.ops.varuna_tests.grows.default
    assert [run(func, fake(1)).shape for _ in range(2)] == [(2,), (3,)]


@pytest.mark.parametrize("func", [aten._conj.default, aten._neg_view.default], ids=str)
def test_what_a_form_does_not_show_is_not_remembered(func: Any, mode: CountingMode, fake: Any, run: Run) -> None:
    for _ in range(2):
        asked = mode.entered
        made = run(func, fake(2, dtype=torch.complex64))
        assert (made.is_conj(), made.is_neg()) == (func is aten._conj.default, func is not aten._conj.default)
        assert mode.entered > asked
