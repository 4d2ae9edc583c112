"""The checked-in stubs run with every library that the package allows to be installed."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from repository import ROOT

STUBS = sorted((ROOT / "proto" / "varuna_proto" / "v1").glob("*_pb2*.py"))
DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


@pytest.mark.parametrize(
    ("library", "generated_for"),
    [("grpcio", r"GRPC_GENERATED_VERSION = '([\d.]+)'"), ("protobuf", r"# Protobuf Python Version: ([\d.]+)")],
)
def test_no_library_is_older_than_the_stubs(library: str, generated_for: str) -> None:
    """Both refuse code that a newer generator has made."""
    versions = [Version(version) for stub in STUBS for version in re.findall(generated_for, stub.read_text())]
    assert versions
    (needed,) = (one for one in map(Requirement, DEPENDENCIES) if one.name == library)
    floors = [Version(one.version) for one in needed.specifier if one.operator == ">="]
    assert max(floors) >= max(versions)
