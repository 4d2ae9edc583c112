"""Errors of a dry run in kernels that PyTorch's dispatcher does not know, and how to declare such kernels."""

from __future__ import annotations

import dis
from types import TracebackType

from varuna.diagnostics.user_code import is_user_file
from varuna.partition.errors import PartitionError

__all__ = ["explain_kernel"]

_SIGNS = ("data pointer", "FakeTensor", "tensor subclasses", "has no storage")
"""Parts of the messages that code gets when it reads the memory of a tensor that has none."""

_BY_KERNELS = (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError)


def explain_kernel(error: Exception, module: str) -> PartitionError | None:
    """The error for the user if a kernel called in `module` raised `error`; None if something else did."""
    place, in_call = _origin(error.__traceback__)
    known = any(sign in str(error) for sign in _SIGNS)
    if not known and not (in_call and isinstance(error, _BY_KERNELS)):
        return None
    return PartitionError(
        f"{f'module {module}' if module else 'the model'} calls at {place} code that cannot run on the tensors of a "
        f"dry run, which have no values ({type(error).__name__}: {error}). If it is a kernel outside of PyTorch's "
        "dispatcher (Triton, an extension), declare what it returns: varuna.opaque(function_or_module, "
        "shapes=lambda x: torch.empty_like(x)), or make it a torch.library.custom_op with register_fake"
    )


def _origin(trace: TracebackType | None) -> tuple[str, bool]:
    """(place of the innermost code of the user, whether the error came from compiled code that it called)."""
    place, in_call = "an unknown place", False
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_user_file(code.co_filename):
            file = code.co_filename.replace("\\", "/").rpartition("/")[2]
            place = f"{file}:{trace.tb_lineno} in {code.co_name}"
            in_call = dis.opname[code.co_code[trace.tb_lasti]].startswith("CALL")
        else:
            in_call = False  # PyTorch's own code has raised it
        trace = trace.tb_next
    return place, in_call
