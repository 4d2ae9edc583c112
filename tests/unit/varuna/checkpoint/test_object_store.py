"""Checkpoints in an object store: read in ranges, each byte once; what cannot be read is not harmed; credentials."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import torch
from torch import nn

from object_store import Bucket, serve_bucket
from varuna.checkpoint import (
    CheckpointWriter,
    ShapePosition,
    StoreError,
    TrainingState,
    load_checkpoint,
    resume_checkpoint,
)
from varuna.checkpoint.storage.remote import aws_settings
from varuna.data import local_copy
from waiting import DEADLINE_S

LARGE = 5 * 2**20  # elements: 20 MiB
MOST_BYTES = 8 * 2**20
"""The bytes of one request."""


def make_state(value: float = 0.0) -> TrainingState:
    parameters = {
        "large": nn.Parameter(torch.arange(LARGE, dtype=torch.float32) + value),
        "small": nn.Parameter(torch.ones(3)),
    }
    return TrainingState(
        sections=range(1), section_count=1, parameters=parameters, section_of=dict.fromkeys(parameters, 0)
    )


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for step in (1, 2):
        checkpointer = CheckpointWriter(
            str(tmp_path / "bucket" / "job"), generation=1, position=ShapePosition(rank=0, p=1, d=1)
        )
        assert checkpointer.start_save(step, make_state(step))
        outcome = checkpointer.wait(DEADLINE_S)
        assert outcome is not None
        assert outcome.result == "committed", outcome.error
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with serve_bucket(tmp_path / "bucket") as served:
        for name, value in served.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "FROM-ENVIRONMENT")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield served


def assert_is_of(step: int, state: TrainingState) -> None:
    assert torch.equal(state.parameters["large"], make_state(step).parameters["large"])


def test_a_large_file_is_read_in_ranges_and_each_byte_once(bucket: Bucket) -> None:
    state = make_state()
    loaded = resume_checkpoint("s3://bucket/job", state)
    assert loaded is not None
    assert loaded.step == 2
    assert_is_of(2, state)
    of_file = [read.bytes for read in bucket.reads if read.key.endswith(".safetensors")]
    assert max(of_file) <= MOST_BYTES
    assert sum(of_file) == loaded.bytes_read


def test_without_room_to_keep_what_was_read_the_store_is_read_again(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    state = make_state()
    with structlog.testing.capture_logs() as log:
        loaded = load_checkpoint("s3://bucket/job", 2, state)
    assert_is_of(2, state)
    assert sum(read.bytes for read in bucket.reads if read.key.endswith(".safetensors")) == 2 * loaded.bytes_read
    assert [line["error"] for line in log if "read twice" in line["event"]] == ["No space left on device"]


@pytest.mark.long
@pytest.mark.parametrize("refused", ["section-00000", "varuna_ckpt_2/manifest.json"])
def test_credentials_that_do_not_suffice_are_no_harmed_checkpoint(bucket: Bucket, refused: str) -> None:
    bucket.refuses = refused
    state = make_state(7)
    with pytest.raises(StoreError, match=refused):
        resume_checkpoint("s3://bucket/job", state)
    assert_is_of(7, state)


def test_a_harmed_file_is_passed_over_and_nothing_of_it_reaches_the_model(bucket: Bucket) -> None:
    [victim] = (bucket.root / "job" / "varuna_ckpt_2").glob("*.parameters.safetensors")
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    state = make_state()
    loaded = resume_checkpoint("s3://bucket/job", state)
    assert loaded is not None
    assert loaded.step == 1
    assert_is_of(1, state)


def test_data_is_copied_in_ranges(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARUNA_DATA_DIR", str(tmp_path / "data"))
    (bucket.root / "tokens").write_bytes(bytes(range(256)) * (3 * 2**20 // 64))
    assert local_copy("s3://bucket/tokens").read_bytes() == (bucket.root / "tokens").read_bytes()
    assert max(read.bytes for read in bucket.reads if read.key == "tokens") <= MOST_BYTES


def write_aws(home: Path, credentials: str = "", config: str = "") -> None:
    (home / ".aws").mkdir()
    (home / ".aws" / "credentials").write_text(credentials)
    (home / ".aws" / "config").write_text(config)


KEYS = "[default]\naws_access_key_id = FROM-FILE\naws_secret_access_key = s%ecret\n[other]\naws_access_key_id = OTHER\n"


def test_the_files_of_aws_give_keys_and_the_store_gets_them(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_aws(tmp_path, KEYS)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    load_checkpoint("s3://bucket/job", 2, make_state())
    assert bucket.access_keys == {"FROM-FILE"}


def test_the_environment_counts_more_than_the_files_of_aws(bucket: Bucket, tmp_path: Path) -> None:
    write_aws(tmp_path, KEYS)
    load_checkpoint("s3://bucket/job", 2, make_state())
    assert bucket.access_keys == {"FROM-ENVIRONMENT"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"access_key_id": "FROM-FILE", "secret_access_key": "s%ecret", "region": "eu-west-1"}),
        ({"AWS_REGION": "us-east-2"}, {"access_key_id": "FROM-FILE", "secret_access_key": "s%ecret"}),
        ({"AWS_PROFILE": "other"}, {"access_key_id": "OTHER", "region": "ap-south-1"}),
        ({"AWS_ACCESS_KEY_ID": "x"}, {"region": "eu-west-1"}),
        ({"AWS_PROFILE": "none"}, {}),
    ],
)
def test_profiles_and_regions_are_those_of_aws(
    tmp_path: Path, environ: dict[str, str], expected: dict[str, str]
) -> None:
    write_aws(tmp_path, KEYS, "[default]\nregion = eu-west-1\n[profile other]\nregion = ap-south-1\n")
    assert aws_settings({"HOME": str(tmp_path), **environ}) == expected


def test_a_profile_that_needs_boto3_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_aws(tmp_path, config="[profile work]\nsso_session = corp\nregion = eu-west-1\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"profile work of ~/\.aws has sso_session.*varuna-spot\[s3\]"):
        aws_settings({"HOME": str(tmp_path), "AWS_PROFILE": "work"})


def test_files_of_aws_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write_aws(tmp_path, "no section\n")
    with pytest.raises(ValueError, match=r"\.aws/credentials cannot be read"):
        aws_settings({"HOME": str(tmp_path)})
