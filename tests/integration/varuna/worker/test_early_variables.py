"""The modules imported ahead of a job's workers read no environment variable that workers get only later."""

from __future__ import annotations

import json
import subprocess
import sys

from varuna_proto.environment import is_read_early
from waiting import DEADLINE_S

RECORDS = """
import importlib, json, os
from collections.abc import MutableMapping
read, kind = set(), type(os.environ)
get, has = kind.__getitem__, MutableMapping.__contains__
kind.__getitem__ = lambda self, name: (read.add(name), get(self, name))[1]
kind.__contains__ = lambda self, name: (read.add(name), has(self, name))[1]
kind.__iter__ = lambda self: iter(())  # whoever copies it all has not read each
importlib.import_module("varuna.worker.preload")
print(json.dumps(sorted(read)))
"""


def test_a_worker_misses_nothing_that_was_read_before_it_was_forked() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", RECORDS], capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    read = json.loads(ran.stdout.splitlines()[-1])
    assert len(read) > 50, "torch reads many"
    assert [name for name in read if not is_read_early(name)] == []


def test_what_the_job_reads_itself_is_given_with_the_fork() -> None:
    for name in ("HF_TOKEN", "HF_HOME", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DATA", "SEED", "MY_PATH"):
        assert not is_read_early(name), name
    for name in ("PYTHONPATH", "LD_PRELOAD", "OMP_NUM_THREADS", "TORCH_LOGS", "CUDA_VISIBLE_DEVICES", "PATH", "HOME"):
        assert is_read_early(name), name
