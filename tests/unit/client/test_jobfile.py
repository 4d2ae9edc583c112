"""Job files: what is read from them, and one clear line for each thing that may be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from repository import ROOT
from varuna_client import UserError
from varuna_client.jobfile.jobfile import JobFileError, load_job
from varuna_client.jobfile.overrides import parse_overrides
from varuna_client.jobfile.schema import job_schema
from varuna_manager.domain.spec import JobSpec
from varuna_proto.rest import JobSpecDocument

EXAMPLE = ROOT / "examples" / "gpt" / "job.yaml"
RUNS = "run: python -m train\nglobal_batch: 8\n"


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
    assert file.spec == {"name": "my-model", "run": "python -m train", "global_batch": 8, "workdir": str(folder)}


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
        (f"{RUNS}name: x\nenv: {{A: 2026-13-45}}\n", ":1: not valid YAML: month must be in 1..12"),
        ("[" * 5000, ":1: not valid YAML: maximum recursion depth exceeded"),
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
        (f"{RUNS}name: x\nresources:\n  max_gpu: 4\n", ":5: resources.max_gpu: unknown; did you mean max_gpus?"),
        (f"{RUNS}name: x\nlimits:\n  zzz: 4\n", ":5: limits.zzz: unknown; the keys are max_duration_s, max_cost, "),
        (f"{RUNS}name: x\nmax_gpus: 4\n", ":4: max_gpus: unknown; did you mean resources.max_gpus?"),
        (f"{RUNS}name: x\nplan:\n  steps: 4\n", ":5: plan.steps: unknown; did you mean steps?"),
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
    assert published == job_schema(), "write it again: varuna validate --schema > docs/job.schema.json"
    jsonschema.Draft202012Validator.check_schema(published)
    jsonschema.validate(yaml.safe_load(EXAMPLE.read_text()), published)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"run": "x", "global_batch": 0}, published)


@pytest.mark.parametrize(
    "run",
    [
        "python train.py",
        "  python3 train.py --data '$DATA' # comment",
        "A=1 PYTHONPATH=src python3.11 -u -OO sub/train.py",
    ],
)
def test_a_script_that_is_not_in_the_workdir_is_an_error(tmp_path: Path, run: str) -> None:
    path = write(tmp_path, json.dumps({"run": run, "global_batch": 8, "name": "x"}))
    script = "sub/train.py" if "sub" in run else "train.py"
    with pytest.raises(JobFileError, match=rf":1: run: {script} is not in the workdir {tmp_path}: correct its path"):
        load_job(path)
    (tmp_path / script).parent.mkdir(exist_ok=True)
    (tmp_path / script).write_text("")
    load_job(path)


@pytest.mark.parametrize(
    "job",
    [
        {"run": "python -m train"},
        {"run": "python -c 'print(1)' train.py"},
        {"run": "python -X dev train.py"},
        {"run": "python $SCRIPT.py"},
        {"run": "python /opt/train.py"},  # on the VMs
        {"run": "python ../train.py"},
        {"run": "python train"},
        {"run": "cd src; python train.py"},
        {"run": "cd src && python train.py"},
        {"run": "cd src\npython train.py"},
        {"run": "python train.py || python other.py"},
        {"run": "torchrun train.py"},
        {"run": "python 'train.py"},
        {"run": "python train.py", "setup": "git clone https://example.com/repository ."},
        {"run": "python train.py", "copy_workdir": False},
    ],
)
def test_a_script_that_may_be_there_on_the_vms_is_no_error(tmp_path: Path, job: dict[str, object]) -> None:
    load_job(write(tmp_path, json.dumps({"global_batch": 8, "name": "x", **job})))


def overridden(path: Path, *settings: str, env: tuple[str, ...] = (), name: str | None = None) -> JobSpecDocument:
    return load_job(path, list(parse_overrides(settings, env, name))).spec


def test_settings_of_the_command_line_replace_the_files(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    path = write(tmp_path, f"{RUNS}name: x\nresources: {{min_gpus: 2, max_gpus: 8}}\nenv: {{A: '1', B: '2'}}\n")
    spec = overridden(
        path,
        "resources.max_gpus=4",
        "limits.max_cost=2.5",
        "checkpoint.may_start_over=true",
        "resources.gpu_type=null",
        "run=python -m other --name a: b # c",
        "copies=on",
        "labels.team/a.b=7",
        "plan={p: 1}",
        "workdir=code",
        "env.A=0x10",
        env=("B=c=d", "E="),
        name="0123",
    )
    assert spec == {
        "name": "0123",
        "run": "python -m other --name a: b # c",
        "global_batch": 8,
        "workdir": str(tmp_path / "code"),
        "resources": {"min_gpus": 2, "max_gpus": 4, "gpu_type": None},
        "limits": {"max_cost": 2.5},
        "checkpoint": {"may_start_over": True},
        "copies": "on",
        "labels": {"team/a.b": "7"},
        "plan": {"p": 1},
        "env": {"A": "0x10", "B": "c=d", "E": ""},
    }
    assert not load_job(path, list(parse_overrides(["copy_workdir=false"], (), None))).copies_workdir


def test_what_the_file_lacks_can_be_given_on_the_command_line(tmp_path: Path) -> None:
    assert overridden(write(tmp_path, "run: a\nname: x\n"), "global_batch=8")["global_batch"] == 8
    assert overridden(write(tmp_path, f"{RUNS}name: a/b\n"), name="x")["name"] == "x"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["resources.max_gpu=4"], "--set resources.max_gpu=4: unknown; did you mean max_gpus?"),
        (["global_bach=4"], "--set global_bach=4: unknown; did you mean global_batch?"),
        (["resources={max_gpu: 4}"], "--set resources={max_gpu: 4}: resources.max_gpu: unknown; did you mean"),
        (["priority=high"], "--set priority=high: 'high': input should be a valid integer"),
        (["plan.d=9"], "--set plan.d=9: plan.d 9 is more than the 8 micro-batches of global_batch 8"),
        (["resources.max_gpus=1"], "--set resources.max_gpus=1: resources: max_gpus 1 is below min_gpus 2"),
        (["workdir=nowhere"], "--set workdir=nowhere: "),
        (["run=python nothing.py"], "--set run=python nothing.py: nothing.py is not in the workdir"),
        (["priority=high", "steps=0"], "--set priority=high: 'high': input should be a valid integer, unable to"),
        (["name"], "--set 'name': expected KEY=VALUE, such as resources.max_gpus=4"),
        (["a..b=1"], "--set 'a..b=1': expected KEY=VALUE"),
        (["steps.x=1"], "--set steps.x=1: steps is 10 in the job file, which has no keys"),
        (["steps=["], "--set steps=[: '[' is not a YAML value"),
        (["steps=2026-13-45"], "--set steps=2026-13-45: '2026-13-45' is not a YAML value"),
    ],
)
def test_a_bad_setting_is_named_as_it_was_given(tmp_path: Path, settings: list[str], says: str) -> None:
    path = write(tmp_path, f"{RUNS}name: x\nsteps: 10\nresources:\n  min_gpus: 2\n")
    with pytest.raises(UserError) as caught:
        overridden(path, *settings)
    assert str(caught.value).startswith(says)
    assert str(caught.value).endswith(" (and 1 more)") == (len(settings) > 1)
    assert "\n" not in str(caught.value)


def test_an_error_of_the_file_is_not_blamed_on_an_override(tmp_path: Path) -> None:
    path = write(tmp_path, f"{RUNS}name: x\nplan: {{d: 9}}\n")
    with pytest.raises(JobFileError, match=r"job\.yaml:1: plan\.d 9 is more"):
        overridden(path, "plan.p=2")
    with pytest.raises(UserError, match="--env A: has a NUL character in it"):
        overridden(write(tmp_path, f"{RUNS}name: x\n"), env=("A=\0",))
    with pytest.raises(UserError, match="--env 'A': expected NAME=VALUE"):
        overridden(path, env=("A",))
