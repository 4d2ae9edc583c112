"""The diffs of docs/from-other-trainers.md, made from examples/migrate. As a program, writes them into the page."""

from __future__ import annotations

import difflib
import re

from repository import ROOT

PAGE = ROOT / "docs" / "from-other-trainers.md"
SCRIPTS = ROOT / "examples" / "migrate"
FRAMEWORKS = ("ddp", "fsdp", "accelerate", "trainer", "lightning")
_DIFF = re.compile(r"^(<!-- ([a-z]+) -->\n)```diff\n.*?^```\n", re.MULTILINE | re.DOTALL)


def render_diff(framework: str) -> str:
    """The lines that differ, with one line around them, without the head that names files."""
    before, after = (
        (SCRIPTS / f"{framework}_{when}.py").read_text().splitlines(keepends=True) for when in ("before", "after")
    )
    lines = list(difflib.unified_diff(before, after, n=1))[2:]
    return "".join("@@\n" if line.startswith("@@") else line for line in lines)


def list_diffs(page: str) -> list[str]:
    """The frameworks that the page shows, in its order."""
    return [framework for _, framework in _DIFF.findall(page)]


def renew_diffs(page: str) -> str:
    """The page with the diffs of the scripts as they are now."""
    return _DIFF.sub(lambda found: f"{found[1]}```diff\n{render_diff(found[2])}```\n", page)


if __name__ == "__main__":
    PAGE.write_text(renew_diffs(PAGE.read_text()))
