"""Each kind of race between host threads is found, and its twin in which something orders the threads is silent.

In each, one thread has waited for the device, or has launched what another one needs. Real time orders the two threads
in both twins, so only vector clocks can tell them apart.
"""

from __future__ import annotations

import _thread
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Event, Stream, Tensor, nn
from torch._C._distributed_c10d import AllreduceOptions, HashStore

import simulated
import varuna.copies.owner
import varuna.pipeline.transport
from host_threads import UnseenGate
from varuna.distributed.gloo import NEVER, connect_group

Turn = Callable[[], object]
Order = Callable[[Turn, Turn], None]
"""Runs the first in one thread, and the second in another one (or the main one) afterwards."""


def find_races(program: Callable[[], object]) -> list[str]:
    """What the device says about the program, raised in any of its threads or noted."""
    found: list[str] = []
    try:
        program()
        simulated.raise_found()
    except RuntimeError as error:
        found.append(str(error))
    found += simulated.take_races()
    torch.accelerator.synchronize()
    return found


@contextmanager
def run_beside(turn: Turn) -> Iterator[threading.Thread]:
    """Another thread, whose error is raised here at the end."""
    errors: list[RuntimeError] = []

    def run() -> None:
        try:
            turn()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    yield thread
    thread.join()
    for error in errors:
        raise error


def by_nothing(first: Turn, second: Turn) -> None:
    gate = UnseenGate()

    def run() -> None:
        first()
        gate.open()

    with run_beside(run):
        gate.wait()
        second()


def by_nothing_but_a_log(first: Turn, second: Turn) -> None:
    """Locks of the log order nothing."""
    log, gate = logging.getLogger("check"), UnseenGate()
    log.addHandler(logging.StreamHandler())

    def run() -> None:
        first()
        log.warning("first")
        gate.open()

    with run_beside(run):
        gate.wait()
        log.warning("second")
        second()


def by_join(first: Turn, second: Turn) -> None:
    with run_beside(first) as thread:
        thread.join()
        second()


def by_looking_at_the_thread(first: Turn, second: Turn) -> None:
    with run_beside(first) as thread:
        while thread.is_alive():
            pass
        second()


def by_start(first: Turn, second: Turn) -> None:
    first()
    with run_beside(second):
        pass


def by_lock(first: Turn, second: Turn) -> None:
    lock, gate = threading.Lock(), UnseenGate()

    def run() -> None:
        with lock:
            first()
            gate.open()

    with run_beside(run):
        gate.wait()
        with lock:
            second()


def by_condition(first: Turn, second: Turn) -> None:
    condition, done = threading.Condition(), list[int]()

    def run() -> None:
        first()
        with condition:
            done.append(1)
            condition.notify_all()

    with run_beside(run):
        with condition:
            condition.wait_for(lambda: done)
        second()


def by_event(first: Turn, second: Turn) -> None:
    event = threading.Event()

    def run() -> None:
        first()
        event.set()

    with run_beside(run):
        event.wait()
        second()


def by_looking_at_an_event(first: Turn, second: Turn) -> None:
    event = threading.Event()

    def run() -> None:
        first()
        event.set()

    with run_beside(run):
        while not event.is_set():
            pass
        second()


def by_semaphore(first: Turn, second: Turn) -> None:
    semaphore = threading.Semaphore(0)

    def run() -> None:
        first()
        semaphore.release()

    with run_beside(run):
        semaphore.acquire()
        second()


def by_simple_queue(first: Turn, second: Turn) -> None:
    items: queue.SimpleQueue[object] = queue.SimpleQueue()
    with run_beside(lambda: items.put(first())):
        items.get()
        second()


def by_queue(first: Turn, second: Turn) -> None:
    items: queue.Queue[object] = queue.Queue()
    with run_beside(lambda: items.put(first())):
        items.get()
        second()


def by_future(first: Turn, second: Turn) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(first).result()
        second()


ORDERS = [
    by_join,
    by_looking_at_the_thread,
    by_start,
    by_lock,
    by_condition,
    by_event,
    by_looking_at_an_event,
    by_semaphore,
    by_simple_queue,
    by_queue,
    by_future,
]
UNORDERED = [by_nothing, by_nothing_but_a_log]
NAMES = {"ids": lambda value: value.__name__}


@pytest.fixture(params=[*ORDERS, *UNORDERED], ids=lambda order: order.__name__)
def order(request: pytest.FixtureRequest) -> Order:
    return request.param


def current(device: torch.device) -> Stream:
    return torch.accelerator.current_stream(device)


def copy_to_host(device: torch.device) -> tuple[Tensor, Event]:
    """Pinned memory, and the event after which a copy from the device is in it. The current stream does not wait."""
    side, x, host = Stream(device), torch.full((64,), 3.0, device=device), torch.empty(64, pin_memory=True)
    side.wait_stream(current(device))
    x.record_stream(side)
    with side:
        host.copy_(x, non_blocking=True)
        return host, side.record_event()


def check(order: Order, races: list[str], text: str) -> None:
    assert bool(races) == (order in UNORDERED), races
    assert order not in UNORDERED or text in races[0], races


def test_a_copy_from_memory_that_another_thread_has_waited_for(device: torch.device, order: Order) -> None:
    def program() -> None:
        host, copied = copy_to_host(device)
        order(copied.synchronize, lambda: host.to(device, non_blocking=True))

    check(
        order, find_races(program), "copy to the device reads on the default stream of device 0 what copy to the host"
    )


FEW = pytest.mark.parametrize("order", [by_nothing, by_simple_queue], **NAMES)


@FEW
def test_two_threads_that_launch_on_one_stream(device: torch.device, order: Order) -> None:
    """Its ops have an order only where their launches have one."""

    def program() -> None:
        x = torch.zeros(64, device=device)
        order(lambda: x.fill_(1), lambda: x + 1)

    check(order, find_races(program), "add reads on the default stream of device 0, launched by thread ")


@FEW
def test_a_stream_that_another_thread_has_made_wait(device: torch.device, order: Order) -> None:
    def program() -> None:
        side, x = Stream(device), torch.zeros(64, device=device)
        side.wait_stream(current(device))
        with side:
            x.fill_(1)
        x.record_stream(side)
        order(lambda: current(device).wait_stream(side), lambda: x + 1)

    check(order, find_races(program), "what fill_ writes on stream")


@FEW
def test_a_wait_for_a_stream_is_for_what_the_thread_knows_to_be_launched(device: torch.device, order: Order) -> None:
    def program() -> None:
        side, x = Stream(device), torch.zeros(64, device=device)
        side.wait_stream(current(device))
        x.record_stream(side)

        def launch() -> None:
            with side:
                x.fill_(1)

        def wait_and_use() -> None:
            side.synchronize()
            x + 1

        order(launch, wait_and_use)

    check(order, find_races(program), "what fill_ writes on stream")


@pytest.mark.parametrize("how", ["synchronize", "query", "wait"])
@FEW
def test_an_event_that_another_thread_records(device: torch.device, order: Order, how: str) -> None:
    """It would count as done if it were recorded a moment later."""

    def program() -> None:
        event = Event(device)
        order(event.record, getattr(event, how))

    check(order, find_races(program), "waits for an event that ")


@FEW
def test_an_event_that_another_thread_has_waited_for_before(device: torch.device, order: Order) -> None:
    def program() -> None:
        event = Event(device)
        event.record()
        order(event.synchronize, event.record)

    check(order, find_races(program), "records an event that another thread waits for")


@FEW
def test_a_backward_in_another_thread_than_the_forward(device: torch.device, order: Order) -> None:
    def program() -> None:
        layer, losses = nn.Linear(4, 4).to(device), list[Tensor]()
        x = torch.ones(2, 4, device=device)
        order(lambda: losses.append(layer(x).square().sum()), lambda: losses[0].backward())

    check(order, find_races(program), "reads on the default stream of device 0, launched by thread ")


@FEW
def test_gradients_of_a_backward_in_another_thread(device: torch.device, order: Order) -> None:
    def program() -> None:
        layer = nn.Linear(4, 4).to(device)
        loss = layer(torch.ones(2, 4, device=device)).sum()
        order(loss.backward, lambda: layer.weight.grad + 1)

    check(order, find_races(program), "add reads on the default stream of device 0, launched by thread ")


@FEW
def test_a_hook_of_the_backward_knows_what_its_caller_knows(device: torch.device, order: Order) -> None:
    """It runs in a thread of autograd, which works for the caller, and passes things on to other threads."""
    items: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    gate = UnseenGate()

    def program() -> None:
        layer = nn.Linear(4, 4).to(device)
        weight = layer.weight

        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if order is by_simple_queue:
                items.put(parameter.grad)
            else:
                grads.append(parameter.grad)
            gate.open()

        def use() -> None:
            gate.wait()
            (items.get() if order is by_simple_queue else grads[0]) + 1

        grads: list[Tensor] = []
        weight.register_post_accumulate_grad_hook(hook)
        with run_beside(use):
            layer(torch.ones(2, 4, device=device)).sum().backward()

    check(order, find_races(program), "add reads on the default stream of device 0, launched by thread other")


def test_backwards_of_several_threads_at_once_are_no_race(device: torch.device) -> None:
    def train(index: int) -> None:
        stream = Stream(f"sim:{index % 2}")
        with stream:
            layer = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(stream.device)
            for _ in range(5):
                layer(torch.ones(2, 8, device=stream.device)).sum().backward()
                with torch.no_grad():
                    for parameter in layer.parameters():
                        parameter.sub_(parameter.grad)
        stream.synchronize()

    def program() -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(train, range(8)))

    assert find_races(program) == []


@FEW
def test_the_host_reads_what_another_thread_has_waited_for(device: torch.device, order: Order) -> None:
    """Only where it says so: the pages are open."""

    def program() -> None:
        host, copied = copy_to_host(device)

        def read() -> None:
            host.numpy().sum()
            simulated.raise_found()
            simulated.use_on_host(host)

        order(copied.synchronize, read)

    check(order, find_races(program), "race: the host reads in thread ")


@FEW
def test_pinned_memory_that_another_thread_fills(device: torch.device, order: Order) -> None:
    def program() -> None:
        host = torch.empty(64, pin_memory=True)

        def fill() -> None:
            simulated.use_on_host(host, writes=True)
            host.fill_(1)

        order(fill, lambda: host.to(device, non_blocking=True))

    check(order, find_races(program), "what the host writes in thread ")


@FEW
def test_gloo_gets_what_another_thread_has_waited_for(device: torch.device, order: Order) -> None:
    group = connect_group(HashStore(), 0, 1, address="127.0.0.1", timeout=NEVER)

    def program() -> None:
        host, copied = copy_to_host(device)
        order(copied.synchronize, lambda: group.allreduce([host], AllreduceOptions()).wait(NEVER))

    check(order, find_races(program), "race: the host writes in thread ")


@pytest.mark.parametrize("waits", [True, False])
def test_memory_that_is_freed_in_another_thread(device: torch.device, waits: bool) -> None:
    """The thread that frees comes after all that held the tensor, so what any of them has waited for counts."""

    def program() -> None:
        side, tensors = Stream(device), [torch.ones(64, device=device)]
        side.wait_stream(current(device))
        with side:
            tensors[0] + 1
        by_nothing(side.synchronize if waits else lambda: None, tensors.clear)
        torch.zeros(640, device=device)
        side.synchronize()

    assert bool(find_races(program)) != waits


def test_an_unfinished_copy_is_found_in_whatever_thread_touches_it(device: torch.device) -> None:
    def program() -> None:
        host, copied = copy_to_host(device)
        with run_beside(lambda: host.numpy().sum()):
            pass
        copied.synchronize()

    assert "the host touched pinned memory before it waited for copy to the host" in find_races(program)[0]


def test_a_thread_whose_start_is_not_seen_knows_what_has_happened(device: torch.device) -> None:
    """As one of a C++ library that calls back into Python: what has started it cannot be seen, and is no race."""

    def program() -> None:
        x, gate, errors = torch.zeros(64, device=device), UnseenGate(), list[RuntimeError]()

        def run() -> None:
            try:
                x + 1
            except RuntimeError as error:
                errors.append(error)
            gate.open()

        _thread.start_new_thread(run, ())
        gate.wait()
        assert errors == []

    assert find_races(program) == []


def test_the_products_queues_are_followed() -> None:
    for module in (varuna.copies.owner, varuna.pipeline.transport):
        assert module.SimpleQueue is queue.SimpleQueue
        assert queue.SimpleQueue.__module__ == "host_threads"
