"""The simulated accelerator as torch's device "sim": builds and loads it, and registers it with torch.

It is compiled once for each state of its sources (`native/`), for all processes of the user. `SIM_DEVICES` (2) says how
many devices there are, `SIM_MEMORY_MIB` (1024) how much memory each has. `entry_points/` makes torch load the device in
any process that has that folder in its path.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from host_threads import follow_threads

NATIVE = Path(__file__).parent / "native"
EXIT_RACES = 86
"""How a process ends that leaves races behind."""

FLAGS = ("-std=c++20", "-O0", "-fPIC", "-shared", "-w", "-D_GLIBCXX_USE_CXX11_ABI=1")


def build_library() -> Path:
    """The compiled device. Several processes may call this at once: one compiles, the others wait for it."""
    sources = sorted(NATIVE.iterdir())
    key = hashlib.sha256(repr((FLAGS, torch.__version__)).encode())
    for source in sources:
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "varuna-tests"
    library = cache / f"simulated-accelerator-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "simulated-accelerator.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            half_made = library.with_suffix(".half-made")
            subprocess.run(_compiler_command(half_made), check=True, capture_output=True, text=True)
            half_made.rename(library)
    return library


def _compiler_command(library: Path) -> list[str]:
    home = Path(torch.__file__).parent
    includes = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    links = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{home / 'lib'}"]
    return ["g++", *FLAGS, *includes, str(NATIVE / "all.cpp"), "-o", str(library), *links]


def register() -> None:
    """Makes `torch.device("sim")` known to this process. Further calls do nothing."""
    if hasattr(torch, "sim"):
        return
    library = build_library()
    torch.ops.load_library(str(library))
    follow_threads(library)
    _follow_gloo()
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _make_device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(_refuse_races)


def _refuse_races() -> None:
    """A process does not end well with races that no op has raised."""
    races = take_races()
    if races:
        print("\n".join(["races on the simulated device:", *races]), file=sys.stderr, flush=True)
        os._exit(EXIT_RACES)


def _make_device_module() -> Any:
    """`torch.sim`, with what torch and Varuna expect of the module of a kind of device, such as `torch.cuda`."""
    count = int(os.environ.get("SIM_DEVICES", "2"))
    generators = tuple(torch.ops.sim.default_generator(index) for index in range(count))

    def index_of(device: Any) -> int:
        index = device if isinstance(device, int) else torch.device(device or "sim").index
        return torch.accelerator.current_device_index() if index is None else index

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    module: Any = types.ModuleType("torch.sim")
    module.default_generators = generators
    module.device_count = lambda: count
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.device = lambda device: torch.accelerator.device_index(index_of(device))
    module.synchronize = lambda device=None: torch.accelerator.synchronize(index_of(device))
    module.get_rng_state = lambda device="sim": generators[index_of(device)].get_state()
    module.set_rng_state = lambda state, device="sim": generators[index_of(device)].set_state(state)
    module.manual_seed = lambda seed: generators[index_of(None)].manual_seed(seed)
    module.manual_seed_all = manual_seed_all
    module.initial_seed = lambda: generators[index_of(None)].initial_seed()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.empty_cache = torch.accelerator.empty_cache
    module.reset_peak_memory_stats = lambda device=None: torch.accelerator.reset_peak_memory_stats(index_of(device))
    module.max_memory_allocated = lambda device=None: torch.accelerator.max_memory_allocated(index_of(device))
    module.mem_get_info = lambda device=None: torch.accelerator.get_memory_info(index_of(device))
    module.get_device_name = lambda device=None: "simulated"
    module.Stream, module.Event = torch.Stream, torch.Event
    return module


def take_races() -> list[str]:
    """The races since the last call that no op has raised."""
    races: list[str] = torch.ops.sim.take_races()
    return races


def take_syncs() -> dict[str, int]:
    """How often the host has waited for a device since the last call, by cause."""
    return dict(torch.ops.sim.take_syncs())


def raise_found() -> None:
    """Raises RuntimeError for races that were found where nothing could be raised, such as a touch by the host."""
    torch.ops.sim.raise_found()


def forbid_syncs(forbidden: bool) -> None:
    """Whether the next wait of the host for a device raises RuntimeError."""
    torch.ops.sim.forbid_syncs(forbidden)


def limit_memory(device: torch.device, limit_bytes: int) -> None:
    """Gives a device less memory than it has."""
    torch.ops.sim.limit_memory(device.index or 0, limit_bytes)


def count_pinned_bytes() -> int:
    """The bytes of pinned host memory that tensors of this process have."""
    count: int = torch.ops.sim.pinned_bytes()
    return count


def use_on_host(tensor: torch.Tensor, *, writes: bool = False) -> None:
    """Says that this thread reads (or writes) pinned memory now, so that a race with another thread is found.

    Memory that one thread has waited for is open to all, so a touch by another one cannot be found without this.
    """
    torch.ops.sim.use_on_host(tensor, writes)


def could_overlap(one: torch.Event, other: torch.Event) -> bool:
    """Whether nothing orders what comes before the two events, so that a real device could do both at once."""
    overlap: bool = torch.ops.sim.could_overlap(one.event_id, other.event_id)
    return overlap


def _follow_gloo() -> None:
    """Gloo uses memory from when it gets it. Its own threads do, in which nothing could be found."""
    gloo: Any = torch.distributed.ProcessGroupGloo
    for name in ("send", "recv", "allreduce", "broadcast"):
        setattr(gloo, name, _followed(getattr(gloo, name), writes=name != "send"))


def _followed(operation: Callable[..., Any], *, writes: bool) -> Callable[..., Any]:
    def start(group: Any, tensors: list[torch.Tensor], *arguments: Any) -> Any:
        for tensor in tensors:
            use_on_host(tensor, writes=writes)
        return operation(group, tensors, *arguments)

    return start


def device_of(rank: int) -> str:
    """For ranks on two devices."""
    return f"sim:{rank % 2}"
