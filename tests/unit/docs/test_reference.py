"""The pages about the command, the job file and the Python API are written from the code."""

from __future__ import annotations

from pathlib import Path

import yaml

import varuna_client
from repository import ROOT
from varuna_client.errors import EXIT_CODES, JobEndedError, VarunaError
from varuna_client.jobfile.jobfile import load_job
from varuna_client.jobfile.schema import KEYS
from varuna_client.reference import job_file as job_reference
from varuna_client.reference import python as python_reference
from varuna_client.reference.cli import page

DOCS = ROOT / "docs"


def test_the_page_is_what_the_command_says() -> None:
    assert (DOCS / "cli.md").read_text() == page(), "write it again: make docs"


def test_the_job_files_page_is_what_their_schema_says_and_its_example_has_every_key(tmp_path: Path) -> None:
    written = job_reference.page()
    assert (DOCS / "job-file.md").read_text() == written, "write it again: make docs"
    (tmp_path / "job.yaml").write_text(job_reference.EXAMPLE)
    load_job(tmp_path / "job.yaml")
    assert set(yaml.safe_load(job_reference.EXAMPLE)) == {*KEYS} - {"profile_only", "copy_workdir"}
    assert all(f"`{key}`" in written for key in KEYS)


def test_the_python_page_is_what_the_code_says_and_has_all_that_is_public() -> None:
    written = python_reference.page()
    assert (DOCS / "python.md").read_text() == written, "write it again: make docs"
    for module in python_reference.MODULES:
        assert all(f"\n### {name}\n" in written for name in python_reference.public_names(module))
    for client in (varuna_client.Client, varuna_client.AsyncClient):
        assert all(name.startswith("_") or f".{name}\n" in written or name == "close" for name in vars(client))
    assert "\n    clip_grad_max_norm: float | None = None,\n" in written
    assert "\njobs(" in written
    assert "-> ApiCall[" not in written, "the methods of clients are documented as calls"


def test_exit_codes_are_what_the_page_says() -> None:
    assert set(EXIT_CODES) == {"0", "1", "2", "130", "another"}
    assert VarunaError("no").exit_code == 1
    ended = [JobEndedError("over", code).exit_code for code in (None, 0, 7, -9)]
    assert ended == [1, 1, 7, 137]
