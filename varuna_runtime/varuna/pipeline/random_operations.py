"""torch's random operations, which get their numbers from the streams of examples while a pass runs.

Each has a hook before its kernel (`torch.library`, below autograd), which slows no other operation. Without a pass, or
with a generator of the model's own, the kernel runs as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from varuna.pipeline.random_by_example import ExampleStreams, active_streams, bystander_generator
from varuna.pipeline.seed_mixing import mix_seed

__all__ = ["install_hooks"]

_aten = torch.ops.aten

# A handler gets the dispatch keys below this hook, and the arguments of the operation.

_NEXT = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
Handler = Callable[..., Any]


def _fill_in_place(streams: ExampleStreams, func: Any, keys: Any, tensor: Tensor, *how: Any, **more: Any) -> Tensor:
    """bernoulli_, uniform_, normal_, ...: every number has the same distribution."""
    streams.fill_tensor(
        func, tensor, lambda part, generator: func.redispatch(keys, part, *how, generator=generator, **more)
    )
    return tensor


def _bernoulli_in_place(streams: ExampleStreams, func: Any, keys: Any, tensor: Tensor, p: float = 0.5) -> Tensor:
    """Like `_fill_in_place`, but from uniform numbers on the CPU, where torch's kernel is several times slower."""
    if tensor.device.type != "cpu":
        return _fill_in_place(streams, func, keys, tensor, p)
    return _bernoulli_of(streams, func, tensor, p)


def _bernoulli_of(streams: ExampleStreams, func: Any, tensor: Tensor, p: Tensor | float) -> Tensor:
    """1 with probability p."""
    uniform = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
    streams.fill_tensor(func, uniform, _uniform)
    return tensor.copy_(uniform < p)


def _uniform(part: Tensor, generator: torch.Generator) -> object:
    return part.uniform_(0.0, 1.0, generator=generator)


def _native_dropout(
    streams: ExampleStreams, func: Any, keys: Any, tensor: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    if train is False or not 0 < p < 1 or tensor.numel() == 0:
        result: tuple[Tensor, Tensor] = func.redispatch(keys, tensor, p, train)
        return result
    mask = torch.empty(tensor.shape, dtype=torch.bool, device=tensor.device)
    streams.fill_tensor(func, mask, lambda part, generator: part.bernoulli_(1 - p, generator=generator))
    return _aten.native_dropout_backward(tensor, mask, 1 / (1 - p)), mask  # the same product, in one kernel


def _normal(streams: ExampleStreams, func: Any, keys: Any, mean: Any, std: Any = 1.0) -> Tensor:
    like = mean if isinstance(mean, Tensor) else std
    shape = _common_shape([x for x in (mean, std) if isinstance(x, Tensor)])
    numbers = torch.empty(shape, dtype=like.dtype, device=like.device)
    streams.fill_tensor(func, numbers, lambda part, generator: part.normal_(0.0, 1.0, generator=generator))
    return numbers.mul_(std).add_(mean)


def _common_shape(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The shape of tensors that are broadcast together."""
    return tuple(torch.broadcast_shapes(*(x.shape for x in tensors)))  # type: ignore[no-untyped-call]


def _rrelu(
    streams: ExampleStreams,
    func: Any,
    keys: Any,
    tensor: Tensor,
    noise: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
) -> Tensor:
    if not training:
        result: Tensor = func.redispatch(keys, tensor, noise, lower, upper, training)
        return result
    streams.fill_tensor(func, noise, lambda part, generator: part.uniform_(lower, upper, generator=generator))
    noise.masked_fill_(tensor > 0, 1.0)
    return tensor.mul_(noise) if func is _aten.rrelu_with_noise_.default else tensor * noise


def _multinomial(
    streams: ExampleStreams, func: Any, keys: Any, weights: Tensor, samples: int, replacement: bool = False
) -> Tensor:
    return streams.draw_each_example(
        func,
        [weights],
        (*weights.shape[:-1], samples),
        lambda generator, part: func.redispatch(keys, part, samples, replacement, generator=generator),
    )


def _of_tensors(streams: ExampleStreams, func: Any, keys: Any, *tensors: Tensor) -> Tensor:
    """poisson, binomial, ...: distributions with tensors as parameters."""
    return streams.draw_each_example(
        func,
        tensors,
        _common_shape(tensors),
        lambda generator, *parts: func.redispatch(keys, *parts, generator=generator),
    )


def _copied_to_out(like: Any, handler: Handler) -> Handler:
    """The handler of an operation with `out=`, from that of `like`, which makes its tensor itself."""

    def draw(streams: ExampleStreams, func: Any, keys: Any, *args: Any, out: Tensor) -> Tensor:
        drawn = handler(streams, like, keys, *args)
        return out.resize_(drawn.shape).copy_(drawn)

    return draw


def _randperm(streams: ExampleStreams, func: Any, keys: Any, n: int, *, out: Tensor) -> Tensor:
    if streams.belongs_to_step((n,)):
        generator = streams.seeded_generator(out.device, mix_seed(streams.new_key()))
    else:
        generator = streams.micro_batch_generator(func, out.device)
    result: Tensor = func.redispatch(keys, n, generator=generator, out=out)
    return result


def _fused(streams: ExampleStreams, func: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Kernels that draw internally: attention, recurrent layers."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("dropout_p") or (given.get("dropout") and given.get("train", True)):
        streams.seed_micro_batch(func, args[0].device)
    return func.redispatch(keys, *args, **kwargs)


_HANDLERS: dict[str, Handler] = {
    "bernoulli_.float": _bernoulli_in_place,
    "bernoulli_.Tensor": lambda streams, func, keys, tensor, p: _bernoulli_of(streams, func, tensor, p),
    "bernoulli.out": lambda streams, func, keys, p, *, out: _bernoulli_of(streams, func, out.resize_(p.shape), p),
    "uniform_": _fill_in_place,
    "normal_": _fill_in_place,
    "random_": _fill_in_place,
    "random_.from": _fill_in_place,
    "random_.to": _fill_in_place,
    "exponential_": _fill_in_place,
    "geometric_": _fill_in_place,
    "cauchy_": _fill_in_place,
    "log_normal_": _fill_in_place,
    "native_dropout": _native_dropout,
    "normal.Tensor_Tensor": _normal,
    "normal.Tensor_float": _normal,
    "normal.float_Tensor": _normal,
    "normal.Tensor_Tensor_out": _copied_to_out(_aten.normal.Tensor_Tensor, _normal),
    "normal.Tensor_float_out": _copied_to_out(_aten.normal.Tensor_float, _normal),
    "normal.float_Tensor_out": _copied_to_out(_aten.normal.float_Tensor, _normal),
    "rrelu_with_noise": _rrelu,
    "rrelu_with_noise_": _rrelu,
    "multinomial": _multinomial,
    "multinomial.out": _copied_to_out(_aten.multinomial.default, _multinomial),
    "poisson": _of_tensors,
    "binomial": _of_tensors,
    "_standard_gamma": _of_tensors,
    "_sample_dirichlet": _of_tensors,
    "randperm.generator_out": _randperm,
    "_scaled_dot_product_flash_attention": _fused,
    "_scaled_dot_product_efficient_attention": _fused,
    "_scaled_dot_product_cudnn_attention": _fused,
    "_scaled_dot_product_fused_attention_overrideable": _fused,
    "_flash_attention_forward": _fused,
    "_efficient_attention_forward": _fused,
    "_cudnn_rnn": _fused,
}
_library: torch.library.Library | None = None


def install_hooks() -> None:
    """Registers the handlers before the kernels, once in a process."""
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name, handler in _HANDLERS.items():
            packet, _, overload = name.partition(".")
            func = getattr(getattr(_aten, packet, None), overload or "default", None)
            if func is not None:  # not every version of torch has all of them
                hook = _hook(func, handler)
                _library.impl(name, hook, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]


def _hook(func: Any, handler: Handler) -> Callable[..., Any]:
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("generator") if "generator" in names else -1

    def hook(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        keys = keyset & _NEXT
        given = args[place] if 0 <= place < len(args) else kwargs.get("generator")
        device = kwargs["out"].device if "out" in kwargs else next(x.device for x in args if isinstance(x, Tensor))
        if given is not None or device.type == "meta":
            return func.redispatch(keys, *args, **kwargs)
        streams = active_streams()
        if streams is None and (place < 0 or (stranger := bystander_generator(device)) is None):
            return func.redispatch(keys, *args, **kwargs)
        if 0 <= place < len(args):
            args = args[:place] + args[place + 1 :]
        kwargs.pop("generator", None)
        if streams is None:
            return func.redispatch(keys, *args, generator=stranger, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return handler(streams, func, keys, *args, **kwargs)

    return hook
