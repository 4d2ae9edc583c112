"""Whatever a script does with an optimizer's state that has not come, it does with what has come."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

from varuna.optim.awaited_state import AwaitedStates


class Late:
    """An optimizer whose state comes when somebody waits for it."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.ones(3))
        self.optimizer = Adam([self.parameter])
        self.before = self.optimizer.state
        self.waits = 0
        self.awaited = AwaitedStates([self.optimizer], self.wait)

    def wait(self) -> None:
        self.waits += 1
        self.awaited.release()
        self.optimizer.state[self.parameter] = {"step": torch.tensor(7.0)}


READS: dict[str, Callable[[Late, Any], Any]] = {
    "item": lambda late, state: state[late.parameter]["step"],
    "get": lambda late, state: state.get(late.parameter)["step"],
    "items": lambda late, state: dict(state.items())[late.parameter]["step"],
    "values": lambda late, state: next(iter(state.values()))["step"],
    "pop": lambda late, state: state.pop(late.parameter)["step"],
    "setdefault": lambda late, state: state.setdefault(late.parameter, {"step": 0})["step"],
    "dict": lambda late, state: dict(state)[late.parameter]["step"],
    "unpacked": lambda late, state: {**state}[late.parameter]["step"],
    "union": lambda late, state: (state | {})[late.parameter]["step"],
    "right union": lambda late, state: ({} | state)[late.parameter]["step"],
    "copy": lambda late, state: copy.copy(state)[late.parameter]["step"],
    "own copy": lambda late, state: state.copy()[late.parameter]["step"],
    "deepcopy": lambda late, state: next(iter(copy.deepcopy(state).values()))["step"],
    "pickle": lambda late, state: next(iter(pickle.loads(pickle.dumps(state)).values()))["step"],
    "state_dict": lambda late, state: late.optimizer.state_dict()["state"][0]["step"],
    "deepcopy of all": lambda late, state: next(iter(copy.deepcopy(late.optimizer).state.values()))["step"],
    "length": lambda late, state: 7 * len(state),
    "bool": lambda late, state: 7 * bool(state),
    "in": lambda late, state: 7 * (late.parameter in state),
    "list": lambda late, state: 7 * (list(state) == [late.parameter]),
    "reversed": lambda late, state: 7 * (list(reversed(state)) == [late.parameter]),
    "equality": lambda late, state: 7 * (state == {late.parameter: {"step": torch.tensor(7.0)}}),
    "inequality": lambda late, state: 7 * (state != {}),
    "text": lambda late, state: 7 * ("tensor(7.)" in repr(state)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_waits_for_the_state(read: Callable[[Late, Any], Any]) -> None:
    late = Late()
    assert read(late, late.optimizer.state) == 7
    assert late.waits == 1
    assert late.optimizer.state is late.before


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_a_script_has_kept_is_what_came(read: Callable[[Late, Any], Any]) -> None:
    late = Late()
    kept = late.optimizer.state
    late.wait()
    assert read(late, kept) == 7
    assert late.waits == 1


def test_a_change_by_the_script_stays() -> None:
    late = Late()
    late.optimizer.state[late.parameter] = {"step": 8}
    assert late.waits == 1
    assert late.before[late.parameter] == {"step": 8}


def test_an_optimizer_is_loaded_whose_state_has_not_come() -> None:
    late = Late()
    late.optimizer.load_state_dict(Adam([nn.Parameter(torch.ones(3))]).state_dict())
    assert not late.optimizer.state


def test_no_method_of_a_dict_is_left_out() -> None:
    state = Late().optimizer.state
    methods = {name for kind in (dict, defaultdict) for name, one in vars(kind).items() if callable(one)}
    harmless = {"__init__", "__new__", "__getattribute__", "__class_getitem__", "__sizeof__", "fromkeys"}
    unordered = {"__lt__", "__le__", "__gt__", "__ge__"}
    replaced = {"__reduce__"}  # by __reduce_ex__, which is asked first
    assert methods - harmless - unordered - replaced <= {*vars(type(state))}


def test_what_does_not_look_into_the_state_does_not_wait() -> None:
    late = Late()
    late.optimizer.zero_grad()
    late.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    torch.optim.lr_scheduler.StepLR(late.optimizer, 3)
    assert repr(late.optimizer)
    assert isinstance(late.optimizer.state, defaultdict)
    assert late.waits == 0
