"""Job files: what is read from them, and one clear line for each thing that may be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from varuna_client import UserError
from varuna_client.jobfile import KEYS, load_job
from varuna_manager.domain.spec import JobSpec

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt" / "job.yaml"


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def test_the_example_is_a_job_that_the_manager_takes() -> None:
    spec = load_job(EXAMPLE)
    assert JobSpec.model_validate(spec).name == "gpt"
    assert spec["workdir"] == str(EXAMPLE.parent)


def test_the_keys_are_those_of_the_manager() -> None:
    assert set(KEYS) == set(JobSpec.model_fields)


def test_name_and_workdir_default_to_the_folder_of_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    spec = load_job(write(folder, "run: python train.py\nglobal_batch: 8\n"))
    assert spec == {"name": "my-model", "run": "python train.py", "global_batch": 8, "workdir": str(folder)}


def test_a_relative_workdir_counts_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    assert load_job(write(tmp_path, "workdir: code\n"))["workdir"] == str(tmp_path / "code")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "expected 'key: value' lines"),
        ("", "expected 'key: value' lines"),
        ("name: [unclosed\n", "not valid YAML"),
        ("name: x\nglobal_bach: 3\n", "unknown global_bach; it may say name, workdir, run, global_batch"),
        ("workdir: nowhere\n", "is not a folder"),
    ],
)
def test_a_bad_file_gets_one_line_that_names_it(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        load_job(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_binary_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.yaml: No such file"):
        load_job(tmp_path / "nothing.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="is not text"):
        load_job(tmp_path / "binary")
