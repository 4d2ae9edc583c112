"""Job files: what is read from them, and one clear line for each thing that may be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from repository import ROOT
from varuna_client import UserError
from varuna_client.jobfile.jobfile import JobFileError, job_schema, load_job
from varuna_manager.domain.spec import JobSpec

EXAMPLE = ROOT / "examples" / "gpt" / "job.yaml"
RUNS = "run: python train.py\nglobal_batch: 8\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def test_the_example_is_a_job_that_the_manager_takes() -> None:
    spec = load_job(EXAMPLE).spec
    assert JobSpec.model_validate(spec).name == "gpt"
    assert spec["workdir"] == str(EXAMPLE.parent)


def test_name_and_workdir_default_to_the_folder_of_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    file = load_job(write(folder, RUNS))
    assert file.copies_workdir
    assert file.spec == {"name": "my-model", "run": "python train.py", "global_batch": 8, "workdir": str(folder)}


def test_a_relative_workdir_counts_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    file = load_job(write(tmp_path, f"{RUNS}name: x\nworkdir: code\ncopy_workdir: false\n"))
    assert file.spec["workdir"] == str(tmp_path / "code")
    assert not file.copies_workdir


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", ":1: expected 'key: value' lines"),
        ("", ":1: expected 'key: value' lines"),
        ("name: x\nrun: [unclosed\n", ":3: not valid YAML: expected ',' or ']'"),
        (f"{RUNS}name: x\nglobal_bach: 3\n", ":4: global_bach: unknown; did you mean global_batch?"),
        (f"{RUNS}name: x\nzzz: 3\n", ":4: zzz: unknown; the keys are name, workdir, setup, run"),
        (f"{RUNS}name: x\narchive: {'0' * 64}\n", ":4: archive: unknown;"),
        (f"{RUNS}name: x\nworkdir: nowhere\n", ":4: workdir: "),
        (f"{RUNS}name: x\ncopy_workdir: 1\n", ":4: copy_workdir: 1 is neither true nor false"),
        ("name: x\nrun: a\n", ":1: global_batch: is missing"),
        ("name: x\nrun: a\nglobal_batch: 5000000000\n", ":3: global_batch: 5000000000: input should be less than"),
        (f'{RUNS}name: x\nenv:\n  "\\ud800": a\n', ":4: env: '\\ud800' is not a valid variable name"),
        (f'{RUNS}name: x\nenv:\n  A: "\\0"\n', ":5: env.A: has a NUL character in it"),
        (f'{RUNS}name: x\n"\\ud800": a\n', ":1: '\\ud800': input should be a valid string"),
        (f'{RUNS}name: x\nworkdir: "\\0"\n', ":4: workdir: "),
        (f'{RUNS}name: x\nworkdir: "\\ud800"\n', ":4: workdir: "),
        (f"{RUNS}name: x\nresources:\n  min_gpus: 8\n  max_gpus: 4\n", ":4: resources: max_gpus 4 is below min_gpus 8"),
        (f"{RUNS}name: x\nresources:\n  max_gpu: 4\n", ":5: resources.max_gpu: there is no such setting"),
        (f"{RUNS}name: x\npriority: high\n", ":4: priority: 'high': input should be a valid integer"),
        (f"{RUNS}name: x\nplan: {{d: 9}}\n", ":1: plan.d 9 is more than the 8 micro-batches of global_batch 8"),
        (f"{RUNS}name: x\nrun: other\n", ":4: run: is given twice"),
        (f"{RUNS}name: 'a/b'\n", ":3: name: must be 1 to 63 letters"),
    ],
)
def test_a_bad_file_gets_one_line_that_names_the_place(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(JobFileError) as caught:
        load_job(path)
    assert f"{path}{says}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_that_is_wrong_is_found_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "name: x\nrun: a\nglobal_batch: 0\npriority: 1000\n")
    with pytest.raises(JobFileError, match=r":3: global_batch: .*\(and 1 more: varuna validate .*\)$") as caught:
        load_job(path)
    assert [(problem.line, problem.where) for problem in caught.value.problems] == [
        (3, "global_batch"),
        (4, "priority"),
    ]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load_job(tmp_path / "nothing.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(UserError, match="is not text"):
        load_job(tmp_path / "binary")


def test_the_published_schema_is_that_of_the_code_and_takes_the_example() -> None:
    published = json.loads((ROOT / "docs" / "job.schema.json").read_text())
    assert published == job_schema(), "write it anew: varuna validate --schema > docs/job.schema.json"
    jsonschema.Draft202012Validator.check_schema(published)
    jsonschema.validate(yaml.safe_load(EXAMPLE.read_text()), published)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"run": "x", "global_batch": 0}, published)
