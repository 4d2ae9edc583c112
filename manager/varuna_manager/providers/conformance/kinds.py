"""What the entry point of a provider must do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from varuna_manager.providers.choice import check_choice, find_kind
from varuna_manager.providers.conformance.running import check_one_line
from varuna_manager.providers.kind import ProviderKind

__all__ = ["KindConformance"]


class KindConformance:
    """Subclass it with a name that starts with Test, and set `name`. The package has to be installed."""

    name: str
    """Of the entry point."""

    def test_the_entry_point_names_a_kind_that_loads(self) -> None:
        assert re.fullmatch(r"[a-z][a-z0-9-]*", self.name)
        kind = find_kind(self.name)
        assert isinstance(kind, ProviderKind)
        assert kind.argument

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (None, "No such file"),
            (b"[", ""),
            (b"- 1\n", ""),
            (b"\xff\xfe\xff", ""),
            (b"colour_of_the_sky: blue\n", ""),
        ],
        ids=["missing", "no YAML", "a list", "no text", "an unknown field"],
    )
    def test_a_wrong_file_is_refused_in_one_line_that_names_it(
        self, tmp_path: Path, content: bytes | None, expected: str
    ) -> None:
        path = tmp_path / "settings.yaml"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(str(path))) as raised:
            check_choice(f"{self.name}:{path}")
        check_one_line(str(raised.value))
        assert expected in str(raised.value)
