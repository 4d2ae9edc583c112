"""A secure manager, a VM that joins by itself, and a job that goes on while the VM's certificate is exchanged."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from cryptography import x509

from secure_world import secure_manager
from varuna_client import Client
from waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow


SCRIPT = """
    import os, sys, time
    from pathlib import Path

    import torch
    from torch import nn
    from varuna import CutPoint, Varuna

    torch.set_num_threads(1)
    secrets = [name for name in os.environ if "TOKEN" in name or name.startswith("VARUNA_MANAGER")]
    assert not secrets, secrets

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.cut, self.second = nn.Linear(4, 8), CutPoint(), nn.Linear(8, 1)

        def forward(self, x):
            return self.second(self.cut(self.first(x))).square().mean()

    model = Varuna(Small(), get_batch_fn=lambda size, device=None: {"x": torch.ones(size, 4)}, batch_size=4)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    while not Path(sys.argv[1]).exists():  # one rank: nobody has to agree
        model.step({"x": torch.ones(4, 4)})
        time.sleep(0.2)
"""


def test_a_job_goes_on_while_its_vm_gets_a_new_certificate(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(dedent(SCRIPT))
    enough = tmp_path / "enough"
    # It is renewed when more than a third of its life is left: half a minute, in which a machine may stand still.
    flags = ["--vms", "1", "--agent-certificate-ttl-s", "90"]
    flags += ["--lost-after-s", "120", "--lease-s", "300", "--hang-minimum-s", "300"]  # a busy machine is slow
    with (
        secure_manager(tmp_path / "data", *flags) as manager,
        Client(manager.url, token=manager.admin_token, ca=str(manager.ca_file), timeout_s=DEADLINE_S) as client,
    ):
        wait_until(lambda: [vm["state"] for vm in client.vms()] == ["ready"], "the VM")
        identity = manager.data_dir / "vms" / client.vms()[0]["id"] / "identity" / "identity.json"
        assert identity.stat().st_mode & 0o777 == 0o600
        first = certificate(identity)
        spec: Any = {"name": "train", "workdir": str(tmp_path), "global_batch": 4}
        job = client.submit({**spec, "run": f"{sys.executable} train.py {enough}"})["id"]

        wait_until(lambda: (client.job(job)["step"] or 0) >= 1, "its first step")
        wait_until(lambda: certificate(identity) != first, "another certificate")
        wait_until(lambda: datetime.now(UTC) > first.not_valid_after_utc, "the end of the first certificate")
        step = client.job(job)["step"] or 0
        wait_until(lambda: (client.job(job)["step"] or 0) > step, "a step after that")

        connected = manager.log.count("an agent connected")
        manager.kill_and_start_again()  # the VM dials again, with what it has now
        wait_until(lambda: manager.log.count("an agent connected") > connected, "the VM again")
        enough.touch()
        wait_until(lambda: client.job(job)["state"] in ("succeeded", "failed"), "the job's end")
        assert client.job(job)["state"] == "succeeded", client.logs(job)
        kinds = [generation["kind"] for generation in client.generations(job)]
        assert kinds.count("training") == 1


def certificate(identity: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(json.loads(identity.read_text())["certificate_pem"].encode())
