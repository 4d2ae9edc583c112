"""The environment of a worker: `varuna_agent` writes it, `varuna` reads it.

One class does both, so that writer and reader agree.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from varuna_proto.plan import Plan
from varuna_proto.stage_map import StageMap

EXIT_GENERATION_ENDED = 75
"""The worker left on command (os.EX_TEMPFAIL: try again elsewhere)."""

EXIT_PEER_LOST = 76
"""The worker left because another rank of its generation was gone."""

PROGRAM_VARIABLE = "VARUNA_PROGRAM"
"""Not in a worker's environment, but in its agent's: the path of `varuna` by which it was started."""


_READ_EARLY = re.compile(
    "|".join(
        (
            # The loader, the C library, the interpreter.
            r"LD_|GLIBC_|GCONV_PATH|LOCPATH|MALLOC_|LC_|LANG|TZ|_?PYTHON|VIRTUAL_ENV|CONDA|COVERAGE_|COV_CORE_",
            r"(PATH|HOME|USER|USERNAME|LOGNAME|LNAME|SHELL|TERM|CI|TMPDIR|TMP|TEMP|CC|CXX|NO_COLOR|FORCE_COLOR)$",
            # Arithmetic on the processor and the device.
            r"OMP_|GOMP_|KMP_|MKL|OPENBLAS|GOTO_|BLIS_|BLAS|NVPL_|VECLIB|ATEN_|ONEDNN|DNNL|NUMEXPR|NPY_|NUMPY|CUDA|CUDNN",
            r"CUBLAS|CUSOLVER|NVIDIA|NV_|NCCL|HIP_|HSA_|ROC|MIOPEN|XPU|ZE_|SYCL|ASCEND|XLA|TPU|MPS_|METAL",
            # torch and what it imports.
            r"TORCH|PYTORCH|PT2_|PT_|AOT|TRITON|INDUCTOR|FX_|COMPILE_|DUMP_|ENABLE_|DISABLE_|FAKE_|LOG_|PARTITIONER_",
            r"KINETO|CUTE|CUTLASS|UNSAFE_|SYMPY|MPMATH|SAGE|GMPY|PROTOCOL_BUFFERS|TEMPORARILY_|PSUTIL|PYDANTIC|VARUNA_",
        )
    )
)


def is_read_early(variable: str) -> bool:
    """Whether the loader, Python or torch may read this environment variable before a job's script begins.

    A process that has done the imports has read such a variable, so its forks cannot get another value. Every other
    variable can be set in the fork.
    """
    return _READ_EARLY.match(variable) is not None


def memory_socket(agent_socket: str) -> str:
    """The path of the agent's socket for memory files (worker.proto), beside the one for its workers."""
    return f"{agent_socket}.mem"


class Mode(StrEnum):
    TRAIN = "train"
    CALIBRATE = "calibrate"
    INSPECT = "inspect"


class OnNonFinite(StrEnum):
    """What happens at a step whose loss or gradient is not finite: the job file's `on_nonfinite`."""

    SKIP = "skip"
    """It updates nothing, up to as many in a row as the script allows."""
    STOP = "stop"
    """The script ends with FloatingPointError."""
    GO_ON = "go_on"
    """Its update is made."""


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """What a worker knows before it meets its peers.

    Ranks are numbered replica by replica: rank = replica * p + stage. Only `launcher_map` has the numbers of another
    launcher, which may differ.
    """

    job_id: str
    generation: int
    mode: Mode
    rank: int
    local_rank: int
    world_size: int
    rendezvous_host: str
    rendezvous_port: int
    plan: Plan
    """Without its predictions."""
    checkpoint_url: str = ""
    local_checkpoint_dir: str = ""
    """Folder on the VM for copies of its workers' parts of checkpoints; empty: no copies."""
    profile_cache_url: str = ""
    """Where a calibration finds earlier measurements and stores its own; empty: nowhere."""
    checkpoint_interval_s: float = 0.0
    """The user's interval between automatic checkpoints, in seconds; 0: the worker decides."""
    stops_per_hour: float = 0.0
    """How often lost VMs are expected to send the job back to its checkpoint, from which the worker decides; 0: not
    known."""
    stops_without_copies_per_hour: float = 0.0
    """The same as long as no copies of states are whole; less than `stops_per_hour`: as that."""
    device: str = "cpu"
    gpu_type: str = ""
    """The type of the VM's GPUs, as its agent reports it; empty: not known."""
    zone: str = ""
    """The VM's zone, within which the network is fast; empty: not known."""
    agent_socket: str = ""
    """The agent's Unix socket; empty: no agent runs this worker."""
    traceparent: str = ""
    """W3C trace context of this rank's start, for spans under it; empty: no tracing."""
    secret: str = field(default="", repr=False)
    """By which the workers of the generation authenticate each other; empty: they accept any peer."""
    secret_from_agent: bool = False
    """The agent gives the secret over its socket, where neither logs nor children of the script see it."""
    committed_step: int = 0
    """The step of the newest recorded checkpoint, so that one must be found; 0: there may be none."""
    holders: tuple[int, ...] = ()
    """Ranks of the generation before whose processes give their state to this one; empty: none do."""
    survivors: tuple[int, ...] = ()
    """Ranks of this generation whose processes are those of the one before, with its state; the others are new and
    join them. Empty: all processes are new, or none is."""
    newcomer: int = 0
    """The number of a process that was started ahead and waits in `Varuna()` for its rank. Until then all else here is
    what is expected. 0: it has its rank."""
    keepers: tuple[int, ...] = ()
    """By stage: the rank that keeps a copy of what the stage's rank in the first replica has; empty: no copies."""
    copies_shares: bool = False
    """In long steps, each rank's sums of gradients are copied to another rank now and then: one with its stage, or its
    keeper where there is one replica."""
    on_non_finite: OnNonFinite = OnNonFinite.SKIP
    report_path: str = ""
    """For Mode.INSPECT: the file for the report, as JSON."""
    report_times: str = ""
    """For Mode.INSPECT: `measure`, or a file with the profile that has the sections' times; empty: no times."""
    launcher_map: str = ""
    """If torchrun or a similar launcher started this process: the stage-to-rank map in that launcher's numbers. Such
    workers exchange their rendezvous address through torch's store. No environment variable has it."""
    shape_is_open: bool = False
    """The script leaves the shape to the planner, under another launcher. The ranks choose the plan when they have met.
    Before that, `plan` has each of them as a replica, and the script's micro-batch or 0. No environment variable has
    it."""

    @classmethod
    def alone(cls, job_id: str, *, micro_batch: int, global_batch: int, device: str = "cpu") -> WorkerEnvironment:
        """The environment of a training worker without peers."""
        return cls(
            job_id=job_id,
            generation=1,
            mode=Mode.TRAIN,
            rank=0,
            local_rank=0,
            world_size=1,
            rendezvous_host="127.0.0.1",
            rendezvous_port=0,
            plan=Plan(p=1, d=1, micro_batch=micro_batch, global_batch=global_batch),
            device=device,
        )

    @property
    def joins_survivors(self) -> bool:
        """Whether this is a new process in a generation of survivors."""
        return bool(self.survivors) and self.rank not in self.survivors

    @property
    def stage_to_rank_map(self) -> str:
        """Stages joined by `;`, the ranks of a stage's replicas by `,`, in the launcher's numbers."""
        return self.launcher_map or str(StageMap.of_shape(self.plan.p, self.plan.d))

    @property
    def launcher_rank(self) -> int:
        """This rank's number in the launcher's numbering."""
        return StageMap.parse(self.stage_to_rank_map).stages[self.rank % self.plan.p][self.rank // self.plan.p]

    def to_environ(self) -> dict[str, str]:
        """As environment variables, including torchrun's names."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.rendezvous_host,
            "MASTER_PORT": str(self.rendezvous_port),
            "VARUNA_JOB_ID": self.job_id,
            "VARUNA_GENERATION": str(self.generation),
            "VARUNA_MODE": self.mode.value,
            "VARUNA_STAGE_TO_RANK_MAP": self.stage_to_rank_map,
            "VARUNA_CHUNK_SIZE": str(self.plan.micro_batch),
            "VARUNA_GLOBAL_BATCH": str(self.plan.global_batch),
            "VARUNA_STAGE_STARTS": ",".join(map(str, self.plan.stage_starts)),
            "VARUNA_SCHEDULE": self.plan.policy,
            "VARUNA_RUN_AHEAD": str(self.plan.run_ahead),
            "VARUNA_RECOMPUTE": ",".join(str(int(r)) for r in self.plan.recompute),
            **({"VARUNA_SHARES": ",".join(map(str, self.plan.shares))} if self.plan.shares else {}),
            **({"VARUNA_LINK_CONNECTIONS": str(self.plan.link_connections)} if self.plan.link_connections > 1 else {}),
            "VARUNA_CHECKPOINT_URL": self.checkpoint_url,
            "VARUNA_LOCAL_CHECKPOINT_DIR": self.local_checkpoint_dir,
            "VARUNA_PROFILE_CACHE_URL": self.profile_cache_url,
            "VARUNA_CHECKPOINT_INTERVAL_S": repr(self.checkpoint_interval_s),
            "VARUNA_STOPS_PER_HOUR": repr(self.stops_per_hour),
            "VARUNA_STOPS_WITHOUT_COPIES_PER_HOUR": repr(self.stops_without_copies_per_hour),
            "VARUNA_DEVICE": self.device,
            **({"VARUNA_GPU_TYPE": self.gpu_type} if self.gpu_type else {}),
            **({"VARUNA_ZONE": self.zone} if self.zone else {}),
            "VARUNA_AGENT_SOCKET": self.agent_socket,
            **({"VARUNA_SECRET": self.secret} if self.secret else {}),
            **({"VARUNA_SECRET_FROM_AGENT": "1"} if self.secret_from_agent else {}),
            **({"VARUNA_COMMITTED_STEP": str(self.committed_step)} if self.committed_step else {}),
            **({"VARUNA_HOLDERS": ",".join(map(str, self.holders))} if self.holders else {}),
            **({"VARUNA_SURVIVORS": ",".join(map(str, self.survivors))} if self.survivors else {}),
            **({"VARUNA_NEWCOMER": str(self.newcomer)} if self.newcomer else {}),
            **({"VARUNA_KEEPERS": ",".join(map(str, self.keepers))} if self.keepers else {}),
            **({"VARUNA_COPIES_SHARES": "1"} if self.copies_shares else {}),
            **({} if self.on_non_finite is OnNonFinite.SKIP else {"VARUNA_ON_NONFINITE": self.on_non_finite.value}),
            **({"VARUNA_REPORT_PATH": self.report_path} if self.report_path else {}),
            **({"VARUNA_REPORT_TIMES": self.report_times} if self.report_times else {}),
            **({"TRACEPARENT": self.traceparent} if self.traceparent else {}),
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> WorkerEnvironment | None:
        """The environment of this process; None if Varuna did not start it.

        Raises ValueError with the name of a missing or malformed variable.
        """
        if "VARUNA_GENERATION" not in environ:
            return None
        stage_map = StageMap.parse(_text(environ, "VARUNA_STAGE_TO_RANK_MAP"))
        if stage_map != StageMap.of_shape(stage_map.p, stage_map.d):
            raise ValueError(
                f"VARUNA_STAGE_TO_RANK_MAP={stage_map}: Varuna's launchers number ranks replica by replica, which is "
                f"{StageMap.of_shape(stage_map.p, stage_map.d)}"
            )
        return cls(
            job_id=_text(environ, "VARUNA_JOB_ID"),
            generation=_int(environ, "VARUNA_GENERATION"),
            mode=Mode(_text(environ, "VARUNA_MODE")),
            rank=_int(environ, "RANK"),
            local_rank=_int(environ, "LOCAL_RANK"),
            world_size=_int(environ, "WORLD_SIZE"),
            rendezvous_host=_text(environ, "MASTER_ADDR"),
            rendezvous_port=_int(environ, "MASTER_PORT"),
            plan=_plan(environ, stage_map),
            checkpoint_url=environ.get("VARUNA_CHECKPOINT_URL", ""),
            local_checkpoint_dir=environ.get("VARUNA_LOCAL_CHECKPOINT_DIR", ""),
            profile_cache_url=environ.get("VARUNA_PROFILE_CACHE_URL", ""),
            checkpoint_interval_s=_float(environ, "VARUNA_CHECKPOINT_INTERVAL_S"),
            stops_per_hour=_float(environ, "VARUNA_STOPS_PER_HOUR"),
            stops_without_copies_per_hour=_float(environ, "VARUNA_STOPS_WITHOUT_COPIES_PER_HOUR"),
            device=environ.get("VARUNA_DEVICE", "cpu"),
            gpu_type=environ.get("VARUNA_GPU_TYPE", ""),
            zone=environ.get("VARUNA_ZONE", ""),
            agent_socket=environ.get("VARUNA_AGENT_SOCKET", ""),
            traceparent=environ.get("TRACEPARENT", ""),
            secret=environ.get("VARUNA_SECRET", ""),
            secret_from_agent=environ.get("VARUNA_SECRET_FROM_AGENT", "") == "1",
            committed_step=int(environ.get("VARUNA_COMMITTED_STEP", "0")),
            holders=_ints(environ, "VARUNA_HOLDERS"),
            survivors=_ints(environ, "VARUNA_SURVIVORS"),
            newcomer=int(environ.get("VARUNA_NEWCOMER", "0")),
            keepers=_ints(environ, "VARUNA_KEEPERS"),
            copies_shares=environ.get("VARUNA_COPIES_SHARES", "") == "1",
            on_non_finite=OnNonFinite(environ.get("VARUNA_ON_NONFINITE", OnNonFinite.SKIP.value)),
            report_path=environ.get("VARUNA_REPORT_PATH", ""),
            report_times=environ.get("VARUNA_REPORT_TIMES", ""),
        )


def _plan(environ: Mapping[str, str], stage_map: StageMap) -> Plan:
    return Plan(
        p=stage_map.p,
        d=stage_map.d,
        micro_batch=_int(environ, "VARUNA_CHUNK_SIZE"),
        global_batch=_int(environ, "VARUNA_GLOBAL_BATCH"),
        stage_starts=_ints(environ, "VARUNA_STAGE_STARTS"),
        policy=_text(environ, "VARUNA_SCHEDULE"),
        run_ahead=_int(environ, "VARUNA_RUN_AHEAD"),
        recompute=tuple(bool(flag) for flag in _ints(environ, "VARUNA_RECOMPUTE")),
        shares=_ints(environ, "VARUNA_SHARES"),
        link_connections=int(environ.get("VARUNA_LINK_CONNECTIONS", "1")),
    )


def _text(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise ValueError(f"{name} is not set, though VARUNA_GENERATION is: start the script with the varuna launcher")
    return environ[name]


def _int(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number") from None


def _float(environ: Mapping[str, str], name: str) -> float:
    """A number of at least 0, which is also the default."""
    text = environ.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}={text!r} is not a number of at least 0")
    return value


def _ints(environ: Mapping[str, str], name: str) -> tuple[int, ...]:
    text = environ.get(name, "")
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a list of whole numbers") from None
