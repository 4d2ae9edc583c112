"""Every path and every name on the architecture page is in the tree."""

from __future__ import annotations

import re

import pytest

from repository import ROOT

PAGE = (ROOT / "ARCHITECTURE.md").read_text()
HOMES = {
    "varuna_proto": "proto",
    "varuna_planner": "planner",
    "varuna": "varuna_runtime",
    "varuna_agent": "agent",
    "varuna_manager": "manager",
    "varuna_client": "client",
}
QUOTED = sorted(set(re.findall(r"`([\w./*]+)`", PAGE)))
PATHS = [word for word in QUOTED if "/" in word and "*" not in word]
NAMED = sorted(set(re.findall(r"`([A-Za-z_.]+)`(?: and `[A-Za-z_]+`)?\s+\(`(\w+/[\w/]+\.py)`\)", PAGE)))


@pytest.mark.parametrize("path", PATHS)
def test_a_path_leads_somewhere(path: str) -> None:
    home = HOMES.get(path.split("/")[0])
    assert (ROOT / (f"{home}/{path}" if home else path)).exists(), path


@pytest.mark.parametrize(("name", "path"), NAMED)
def test_a_name_is_defined_where_the_page_says(name: str, path: str) -> None:
    text = (ROOT / HOMES[path.split("/")[0]] / path).read_text()
    for part in name.split("."):
        assert re.search(rf"\b(class|def) {part}\b", text), f"{path} does not define {part}"


def test_the_page_names_many_of_both() -> None:
    assert len(PATHS) > 60
    assert len(NAMED) > 15
