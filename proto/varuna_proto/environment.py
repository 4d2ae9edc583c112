"""The environment in which an agent starts a worker: written by `varuna_agent`, read by `varuna`.

One class with both directions, so that writer and reader cannot drift apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from varuna_proto.stage_map import StageMap

EXIT_GENERATION_ENDED = 75
"""A worker that left because it was told to (os.EX_TEMPFAIL: try again elsewhere)."""

EXIT_PEER_LOST = 76
"""A worker that left because another rank of its generation was gone."""


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
    """Whether something may read this environment variable before a job's script begins: the loader, Python, torch.

    A worker that is forked from a process that has done those imports cannot be given another value of it. Of all
    others it can: that process need not have them.
    """
    return _READ_EARLY.match(variable) is not None


class Mode(StrEnum):
    TRAIN = "train"
    CALIBRATE = "calibrate"
    INSPECT = "inspect"


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """All that a worker knows before it meets its peers.

    Ranks are numbered replica by replica: rank = replica * p + stage. Another launcher may number them otherwise; that
    numbering is in `launcher_map` alone.
    """

    job_id: str
    generation: int
    mode: Mode
    rank: int
    local_rank: int
    world_size: int
    rendezvous_host: str
    rendezvous_port: int
    p: int
    d: int
    micro_batch: int
    """Examples in a micro-batch."""
    global_batch: int
    """Examples in a mini-batch, over all replicas."""
    stage_starts: tuple[int, ...] = ()
    """First section of each stage; empty: sections are spread evenly by number."""
    policy: str = "work-conserving"
    run_ahead: int = 0
    recompute: tuple[bool, ...] = ()
    """Per stage; empty: no stage recomputes."""
    checkpoint_url: str = ""
    local_checkpoint_dir: str = ""
    """Folder of the VM for copies of its workers' part of this job's checkpoints; empty: none are made."""
    profile_cache_url: str = ""
    """Where a calibration looks for what was measured before, and leaves what it measures; empty: nowhere."""
    checkpoint_interval_s: float = 0.0
    """Seconds between automatic checkpoints as the user wants them; 0: the worker decides."""
    stops_per_hour: float = 0.0
    """How often the loss of a VM is expected to stop this generation, by which the worker decides; 0: not known."""
    device: str = "cpu"
    agent_socket: str = ""
    """Unix socket of the agent; empty when no agent runs this worker."""
    rendezvous_fd: int = -1
    """For rank 0: an inherited socket that holds rendezvous_port for the script's own process group; -1: none."""
    traceparent: str = ""
    """W3C trace context of this rank's start, for spans under it; empty: nobody traces."""
    secret: str = field(default="", repr=False)
    """By which the workers of the generation know each other; empty: anybody who reaches them is taken for one."""
    secret_from_agent: bool = False
    """The agent gives the secret over its socket, where neither logs nor children of the script see it."""
    committed_step: int = 0
    """Of the newest checkpoint that the manager has recorded: one must be found then. 0: there may be none."""
    report_path: str = ""
    """For Mode.INSPECT: the file that the report goes to, as JSON."""
    report_times: str = ""
    """For Mode.INSPECT: `measure`, or a file with the profile that has the sections' times; empty: no times."""
    launcher_map: str = ""
    """Set when torchrun or the like started this process: the stage-to-rank map in that launcher's numbers. Such
    workers exchange the place where they meet through torch's store. It is in no environment variable."""

    @classmethod
    def alone(cls, job_id: str, *, micro_batch: int, global_batch: int, device: str = "cpu") -> WorkerEnvironment:
        """That of a worker without peers, which trains."""
        return cls(
            job_id=job_id,
            generation=1,
            mode=Mode.TRAIN,
            rank=0,
            local_rank=0,
            world_size=1,
            rendezvous_host="127.0.0.1",
            rendezvous_port=0,
            p=1,
            d=1,
            micro_batch=micro_batch,
            global_batch=global_batch,
            device=device,
        )

    @property
    def stage_to_rank_map(self) -> str:
        """Stages joined by `;`, the ranks of a stage's replicas by `,`; in the numbers of whoever started them."""
        return self.launcher_map or str(StageMap.of_shape(self.p, self.d))

    @property
    def launcher_rank(self) -> int:
        """The number of this rank with whoever started it."""
        return StageMap.parse(self.stage_to_rank_map).stages[self.rank % self.p][self.rank // self.p]

    def to_environ(self) -> dict[str, str]:
        """As environment variables, the names that torchrun uses among them."""
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
            "VARUNA_CHUNK_SIZE": str(self.micro_batch),
            "VARUNA_GLOBAL_BATCH": str(self.global_batch),
            "VARUNA_STAGE_STARTS": ",".join(map(str, self.stage_starts)),
            "VARUNA_SCHEDULE": self.policy,
            "VARUNA_RUN_AHEAD": str(self.run_ahead),
            "VARUNA_RECOMPUTE": ",".join(str(int(r)) for r in self.recompute),
            "VARUNA_CHECKPOINT_URL": self.checkpoint_url,
            "VARUNA_LOCAL_CHECKPOINT_DIR": self.local_checkpoint_dir,
            "VARUNA_PROFILE_CACHE_URL": self.profile_cache_url,
            "VARUNA_CHECKPOINT_INTERVAL_S": repr(self.checkpoint_interval_s),
            "VARUNA_STOPS_PER_HOUR": repr(self.stops_per_hour),
            "VARUNA_DEVICE": self.device,
            "VARUNA_AGENT_SOCKET": self.agent_socket,
            "VARUNA_RENDEZVOUS_FD": str(self.rendezvous_fd),
            **({"VARUNA_SECRET": self.secret} if self.secret else {}),
            **({"VARUNA_SECRET_FROM_AGENT": "1"} if self.secret_from_agent else {}),
            **({"VARUNA_COMMITTED_STEP": str(self.committed_step)} if self.committed_step else {}),
            **({"VARUNA_REPORT_PATH": self.report_path} if self.report_path else {}),
            **({"VARUNA_REPORT_TIMES": self.report_times} if self.report_times else {}),
            **({"TRACEPARENT": self.traceparent} if self.traceparent else {}),
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> WorkerEnvironment | None:
        """The environment of this process; None when Varuna did not start it.

        Raises ValueError naming the variable when one is missing or malformed.
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
            p=stage_map.p,
            d=stage_map.d,
            micro_batch=_int(environ, "VARUNA_CHUNK_SIZE"),
            global_batch=_int(environ, "VARUNA_GLOBAL_BATCH"),
            stage_starts=_ints(environ, "VARUNA_STAGE_STARTS"),
            policy=_text(environ, "VARUNA_SCHEDULE"),
            run_ahead=_int(environ, "VARUNA_RUN_AHEAD"),
            recompute=tuple(bool(r) for r in _ints(environ, "VARUNA_RECOMPUTE")),
            checkpoint_url=environ.get("VARUNA_CHECKPOINT_URL", ""),
            local_checkpoint_dir=environ.get("VARUNA_LOCAL_CHECKPOINT_DIR", ""),
            profile_cache_url=environ.get("VARUNA_PROFILE_CACHE_URL", ""),
            checkpoint_interval_s=_float(environ, "VARUNA_CHECKPOINT_INTERVAL_S"),
            stops_per_hour=_float(environ, "VARUNA_STOPS_PER_HOUR"),
            device=environ.get("VARUNA_DEVICE", "cpu"),
            agent_socket=environ.get("VARUNA_AGENT_SOCKET", ""),
            rendezvous_fd=int(environ.get("VARUNA_RENDEZVOUS_FD", "-1")),
            traceparent=environ.get("TRACEPARENT", ""),
            secret=environ.get("VARUNA_SECRET", ""),
            secret_from_agent=environ.get("VARUNA_SECRET_FROM_AGENT", "") == "1",
            committed_step=int(environ.get("VARUNA_COMMITTED_STEP", "0")),
            report_path=environ.get("VARUNA_REPORT_PATH", ""),
            report_times=environ.get("VARUNA_REPORT_TIMES", ""),
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
    """At least 0, which is what it is when it is not set."""
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
