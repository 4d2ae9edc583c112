"""Finds the lines of a log that contain a text, from the parts of the log in their order.

A log may be anything, such as endless lines or binary data. In every case the work is proportional to the log's length,
and at most a piece of it is held in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from varuna_proto.rest import LogMatchDocument

_LINE_SHOWN = 1000
"""Characters."""
_PIECE = 64 * 1024
_LONGEST_CHARACTER = 4
"""Bytes of UTF-8."""


class LineSearch:
    """`add_part` the parts of a log, then call `end_last_line`; `matches` has the first `limit` lines found.

    A line is looked at in pieces. Neighbouring pieces overlap by as much as a match can be long, so none falls between.
    """

    def __init__(self, text: str, limit: int, *, ignore_case: bool) -> None:
        self.matches: list[LogMatchDocument] = []
        self._wanted = text.casefold() if ignore_case else text
        self._limit = limit
        self._ignore_case = ignore_case
        self._overlap = _LONGEST_CHARACTER * (len(self._wanted) + 2)  # with a character cut off at either side
        self._shown = b""
        """The beginning of the present line, as far as it may be shown."""
        self._rest = b""
        """The end of the present line so far, in which a match may begin."""
        self._found = False
        """Whether the present line has a match."""
        self._offset = 0
        """Of the present line."""
        self._length = 0
        """Length of the present line so far."""
        self._line_number = 1

    @property
    def is_full(self) -> bool:
        return len(self.matches) >= self._limit

    @property
    def held_bytes(self) -> int:
        return len(self._shown) + len(self._rest)

    def add_part(self, data: bytes) -> None:
        for piece in _pieces(data):
            if self.is_full:
                return
            self._add_piece(piece)

    def skip_to(self, offset: int) -> None:
        """Go on at `offset`, because the log no longer has what came before. Lines are counted from there on."""
        self._offset, self._length, self._shown, self._rest, self._found = offset, 0, b"", b"", False

    def end_last_line(self) -> None:
        if self._length:
            self._end_line()

    def _add_piece(self, piece: bytes) -> None:
        if not self._found and not self._has_match(self._rest + piece):
            self._skip(piece)
            return
        *lines, last = piece.split(b"\n")
        for line in lines:
            self._add_to_line(line)
            self._length += 1
            self._end_line()
            if self.is_full:
                return
        self._add_to_line(last)

    def _skip(self, piece: bytes) -> None:
        """Skip the lines of a piece without a match, as most pieces of most logs are."""
        end = piece.rfind(b"\n")
        if end < 0:
            self._add_to_line(piece, is_searched=True)
            return
        self._line_number += piece.count(b"\n")
        self._offset += self._length + end + 1
        self._length, self._shown, self._rest = 0, b"", b""
        self._add_to_line(piece[end + 1 :], is_searched=True)

    def _add_to_line(self, data: bytes, *, is_searched: bool = False) -> None:
        wanted = _LONGEST_CHARACTER * _LINE_SHOWN - len(self._shown)
        if wanted > 0:
            self._shown += data[:wanted]
        seen = self._rest + data
        self._found = self._found or (not is_searched and self._has_match(seen))
        self._rest = seen[-self._overlap :]
        self._length += len(data)

    def _end_line(self) -> None:
        if self._found:
            text = self._shown.decode(errors="replace")[:_LINE_SHOWN]
            self.matches.append({"offset": self._offset, "line_number": self._line_number, "text": text})
        self._line_number += 1
        self._offset += self._length
        self._length, self._shown, self._rest, self._found = 0, b"", b"", False

    def _has_match(self, data: bytes) -> bool:
        text = data.decode(errors="replace")
        return self._wanted in (text.casefold() if self._ignore_case else text)


def _pieces(data: bytes) -> Iterator[bytes]:
    for first in range(0, len(data), _PIECE):
        yield data[first : first + _PIECE]
