"""Text files as documents: which files an input names, where a document ends, and what is wrong with a file, by name.

A document is a text whose sentences follow each other: next-sentence pairs come from within one. `documents_by` says
where one ends: `file` (each file is a document), `blank-line` (so does every empty line: the form of books and of
NVIDIA's shards) or `line` (each line is one: the form of extracted encyclopaedias).
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCUMENTS_BY = ("file", "blank-line", "line")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Document:
    """`name` for messages and for telling sources apart; `text` as it was read."""

    name: str
    text: str


def find_files(inputs: Sequence[Path], pattern: str = "*.txt") -> list[Path]:
    """The files that `inputs` name: files as they are, and what matches `pattern` anywhere in a folder, by name.

    Raises ValueError for an input that is not there, a folder without such a file, or the same file twice.
    """
    files: list[Path] = []
    for given in inputs:
        if given.is_dir():
            inside = sorted(path for path in given.rglob(pattern) if path.is_file())
            if not inside:
                raise ValueError(f"{given}: no file in this folder matches {pattern}: give another --pattern")
            files.extend(inside)
        elif given.is_file():
            files.append(given)
        else:
            raise ValueError(f"{given}: no such file or folder: --input takes text files and folders of them")
    twice = [path for path in files if files.count(path) > 1] if len(files) != len(set(files)) else []
    if twice:
        raise ValueError(f"{twice[0]}: is named twice by --input: leave one out")
    return files


def read_documents(
    files: Sequence[Path], *, documents_by: str = "file", encoding: str = "utf-8", errors: str = "strict"
) -> Iterator[Document]:
    """The documents of `files`, in order; empty ones are left out. Only the present document is in memory.

    Raises ValueError for what is not text in `encoding`, with the file and the byte.
    """
    for path in files:
        begin, lines = 1, list[str]()
        for number, line in enumerate(_read_lines(path, encoding, errors), start=1):
            ends = documents_by == "line" or (documents_by == "blank-line" and not line.strip())
            lines.append(line)
            if ends:
                yield from _document(path, begin, lines)
                begin, lines = number + 1, []
        yield from _document(path, begin, lines)


def _document(path: Path, begin: int, lines: list[str]) -> Iterator[Document]:
    text = "\n".join(lines)
    if text.strip():
        yield Document(name=f"{path}:{begin}", text=text)


def _read_lines(path: Path, encoding: str, errors: str) -> Iterator[str]:
    """The lines of a text file, decoded as they are read, with any kind of line end."""
    try:
        decoder = codecs.getincrementaldecoder("utf-8-sig" if encoding.lower() in {"utf-8", "utf8"} else encoding)
    except LookupError:
        raise ValueError(f"--encoding {encoding}: Python knows none of this name; try utf-8 or latin-1") from None
    newlines = io.IncrementalNewlineDecoder(decoder(errors), translate=True)
    read = 0
    begun: list[str] = []  # pieces of a line whose end is not read yet
    with path.open("rb") as file:
        while True:
            chunk = file.read(_CHUNK_BYTES)
            read += len(chunk)
            try:
                text = newlines.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                at = read - len(error.object) + error.start
                raise ValueError(
                    f"{path}: the byte 0x{error.object[error.start]:02x} at offset {at} is not {encoding}: pass the "
                    "file's encoding with --encoding, or --encoding-errors replace to go on without such characters"
                ) from None
            if "\0" in text:
                raise ValueError(
                    f"{path}: is no text in {encoding}, it holds NUL characters: leave it out, or pass its --encoding"
                )
            first, *others = text.split("\n")
            begun.append(first)
            if others:
                yield "".join(begun)
                yield from others[:-1]
                begun = [others[-1]]
            if not chunk:
                break
    yield "".join(begun)
