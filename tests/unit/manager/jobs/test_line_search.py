"""Searching logs: what is found, and that no log makes the search expensive."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_manager.jobs.line_search import LineSearch

logs = st.lists(
    st.one_of(st.binary(max_size=40), st.text("aAbßſ\nİ日", max_size=40).map(str.encode), st.just(b"ab" * 40_000)),
    max_size=12,
).map(b"".join)
texts = st.text("aAbBsSß日i", min_size=1, max_size=4)


def found(parts: list[bytes], text: str, *, ignore_case: bool = True, limit: int = 1000) -> list[Any]:
    search = LineSearch(text, limit, ignore_case=ignore_case)
    for part in parts:
        search.add_part(part)
    search.end_last_line()
    return search.matches


def expected(log: bytes, text: str, *, ignore_case: bool) -> list[tuple[int, int, str]]:
    """The plain search: one whole line after the other."""
    wanted, offset, matches = text.casefold() if ignore_case else text, 0, []
    for number, line in enumerate(log.split(b"\n"), 1):
        shown = line.decode(errors="replace")
        if line and wanted in (shown.casefold() if ignore_case else shown):
            matches.append((offset, number, shown[:1000]))
        offset += len(line) + 1
    return matches


@given(log=logs, text=texts, cuts=st.lists(st.integers(0, 2_000_000), max_size=5), ignore_case=st.booleans())
def test_it_finds_the_lines_that_have_the_text_however_the_log_comes(
    log: bytes, text: str, cuts: list[int], ignore_case: bool
) -> None:
    at = [0, *sorted(min(cut, len(log)) for cut in cuts), len(log)]
    parts = [log[first:last] for first, last in pairwise(at)]
    matches = [
        (match["offset"], match["line_number"], match["text"]) for match in found(parts, text, ignore_case=ignore_case)
    ]
    assert matches == expected(log, text, ignore_case=ignore_case)


@pytest.mark.parametrize("at", [0, 65_530, 65_535, 65_536, 131_000])
@pytest.mark.parametrize("text", ["Grüße", "x" * 1000])
def test_a_match_where_two_pieces_of_a_long_line_meet_is_found(at: int, text: str) -> None:
    log = b"first\n" + b"." * at + text.upper().encode() + b"." * 100_000 + b"\nlast"
    [match] = found([log], text)
    assert (match["offset"], match["line_number"]) == (6, 2)


def test_it_stops_at_its_limit() -> None:
    assert [match["line_number"] for match in found([b"no\n" + b"yes\n" * 10], "yes", limit=3)] == [2, 3, 4]


def test_a_line_without_an_end_is_never_held_as_a_whole() -> None:
    part = b"x" * (1024 * 1024)
    search = LineSearch("never there", 10, ignore_case=True)
    search.add_part(part)  # what is made once is made
    tracemalloc.start()
    try:
        for _ in range(8):
            search.add_part(part)
            assert search.held_bytes < 10_000
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()
