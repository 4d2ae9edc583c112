"""One plain safetensors file of a checkpoint's model, under the names that the user's model has.

A checkpoint's files are copied piece by piece, so the memory that it takes does not grow with the model. Tied
parameters, which a checkpoint holds once, are written under each of their names: the safetensors format has no way to
say that two tensors are one, and `load_state_dict` asks for every name. `from_pretrained` of Hugging Face
transformers does not: a folder for that has them once, as `save_pretrained` writes them.

    python -m varuna.checkpoint.export CKPT --out model.safetensors
    python -m varuna.checkpoint.export CKPT --hf --out folder
    python -m varuna.checkpoint.export CKPT --ema --out averaged.safetensors
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.checksum import Checksum
from varuna.checkpoint.format.manifest import FileEntry, FileKind, Manifest
from varuna.checkpoint.format.tensor_file import LENGTH_BYTES, TensorEntry, make_header, parse_header
from varuna.checkpoint.hugging_face import WEIGHTS_FILE, read_description, write_beside
from varuna.checkpoint.loading.complete_checkpoints import ReportPassedOver, newest_complete, read_manifest
from varuna.checkpoint.storage.store import CheckpointStore, folder_of

__all__ = ["ExportedModel", "export_model"]

_ONE_CHECKPOINT = re.compile(r"(?P<store>.*?)/?varuna_ckpt_(?P<step>0|[1-9][0-9]*)/*")


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """The result of an export."""

    step: int
    source: str
    """The checkpoint's URL."""
    tensors: int
    bytes: int
    out: str


@dataclass(frozen=True, kw_only=True)
class _ByteRange:
    """Bytes `start` to `end` of a source file, and their offset `target` in the new one."""

    start: int
    end: int
    target: int


@dataclass(frozen=True, kw_only=True)
class _ExportTarget:
    """The output of an export."""

    out: Path
    hf: bool
    """`out` is a folder for `from_pretrained`, not a file."""
    tokenizer: Path | None
    ema: bool = False
    """Export the moving average of the parameters instead of the parameters."""

    @property
    def file(self) -> Path:
        """The file for the tensors."""
        return self.out / WEIGHTS_FILE if self.hf else self.out


def export_model(
    checkpoint: str,
    out: Path,
    *,
    hf: bool = False,
    tokenizer: Path | None = None,
    ema: bool = False,
    report: ReportPassedOver | None = None,
) -> ExportedModel:
    """Write the model of `checkpoint` to `out`, a file that appears only when it is whole.

    With `hf`, `out` is a folder for transformers' `from_pretrained`; its weights are written last. A checkpoint has no
    tokenizer: the files of the folder `tokenizer` are copied.

    `checkpoint` is the path or URL of a `varuna_ckpt_<step>` folder, or of a store, in which the newest readable
    checkpoint is used; `report` receives those passed over. `ema`: the moving average in place of the parameters.

    Raises CheckpointError naming what is missing, corrupt or cannot be written.
    """
    if tokenizer is not None and not hf:
        raise ValueError("a tokenizer is for a folder that from_pretrained loads: add --hf")
    target = _ExportTarget(out=out, hf=hf, tokenizer=tokenizer, ema=ema)
    match = _ONE_CHECKPOINT.fullmatch(checkpoint)
    if match:
        return _export_step(match["store"] or ".", int(match["step"]), target)
    before: int | None = None
    passed_over: list[str] = []

    def note(step: int, fault: str) -> None:
        passed_over.append(fault)
        if report is not None:
            report(step, fault)

    while (step := newest_complete(checkpoint, before=before, report=note)) is not None:
        try:
            return _export_step(checkpoint, step, target)
        except _SourceError as error:
            note(step, str(error))
            before = step
    raise CheckpointError(
        f"{CheckpointStore(checkpoint).url} holds no complete checkpoint"
        + (f"; the newest: {passed_over[0]}" if passed_over else ": is this the job's checkpoint URL?")
    )


class _SourceError(CheckpointError):
    """The checkpoint is at fault, so another one may work."""


def _export_step(url: str, step: int, target: _ExportTarget) -> ExportedModel:
    out = target.file
    try:
        manifest = read_manifest(url, step)
        source = _ExportSource(CheckpointStore(url), step, manifest, ema=target.ema)
        names = manifest.state_dict or {name: name for name in manifest.files_by_name(FileKind.PARAMETERS)}
        found = source.locate_tensors(set(names.values()))
    except CheckpointError as error:
        raise _SourceError(str(error)) from error
    if target.ema and not manifest.files_by_name(FileKind.AVERAGE):
        raise CheckpointError(
            f"{source.store.url_of(step)} has no average of the parameters: leave out --ema, or train with "
            "Varuna(..., ema=0.999)"
        )
    if target.hf:
        files, tied = read_description(manifest, source.store.url_of(step))
        names = _drop_tied_names(names, tied)
        _write_beside(files, target)
    header, targets = make_header({name: found[stored][1] for name, stored in names.items()}, {"format": "pt"})
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(header)
            for entry in {entry.name: entry for entry, _ in found.values()}.values():
                inside = [(name, found[stored][1]) for name, stored in names.items() if found[stored][0] is entry]
                copies = [_ByteRange(start=t.start, end=t.end, target=targets[name]) for name, t in inside]
                source.copy_tensors(entry, copies, file)
            file.flush()
            os.fsync(file.fileno())
        written = partial.stat().st_size
        partial.replace(out)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return ExportedModel(step=step, source=source.store.url_of(step), tensors=len(names), bytes=written, out=str(out))


def _drop_tied_names(names: dict[str, str], tied: set[str]) -> dict[str, str]:
    """`names` without those in `tied` whose value is also there under another name."""
    others = {stored for name, stored in names.items() if name not in tied}
    return {name: stored for name, stored in names.items() if name not in tied or stored not in others}


def _write_beside(files: dict[str, str], target: _ExportTarget) -> None:
    try:
        write_beside(files, target.out, target.tokenizer)
    except OSError as error:
        raise CheckpointError(f"cannot write into {target.out}: {error.strerror or error}") from error


@dataclass(frozen=True)
class _ExportSource:
    """The parameter files of a checkpoint."""

    store: CheckpointStore
    step: int
    manifest: Manifest
    ema: bool = False

    def locate_tensors(self, names: Iterable[str]) -> dict[str, tuple[FileEntry, TensorEntry]]:
        """The file of each stored name, and its location there."""
        files = self.manifest.files_by_name(FileKind.PARAMETERS)
        if self.ema:  # a parameter that is not trained has no average: its value serves
            files |= self.manifest.files_by_name(FileKind.AVERAGE)
        headers: dict[str, dict[str, TensorEntry]] = {}
        found = {}
        for name in names:
            if name not in files:
                raise CheckpointError(f"{self.store.url_of(self.step)} holds no {name}, which its manifest names")
            entry = files[name]
            if entry.name not in headers:
                headers[entry.name] = self._header(entry)
            if name not in headers[entry.name]:
                raise self._corrupt(entry, f"it holds no {name}")
            found[name] = (entry, headers[entry.name][name])
        return found

    def _header(self, entry: FileEntry) -> dict[str, TensorEntry]:
        path = self._path(entry)
        try:
            (length,) = struct.unpack("<Q", self.store.get_range(path, 0, LENGTH_BYTES))
            if LENGTH_BYTES + length > entry.bytes:
                raise ValueError(f"a header of {length} bytes")
            found, _ = parse_header(self.store.get_range(path, LENGTH_BYTES, length))
            return found
        except (ValueError, struct.error) as error:
            raise self._corrupt(entry, f"its header cannot be read ({error})") from error

    def copy_tensors(self, entry: FileEntry, copies: list[_ByteRange], into: BinaryIO) -> None:
        """Copies tensors of one file, and verifies the whole file."""
        checksum = Checksum()
        at = 0
        for chunk in self._stream(entry):
            checksum.update(chunk)
            end = at + len(chunk)
            for copy in copies:
                first, last = max(copy.start, at), min(copy.end, end)
                if first < last:
                    into.seek(copy.target + first - copy.start)
                    into.write(chunk[first - at : last - at])
            at = end
        if at != entry.bytes or str(checksum) != entry.checksum:
            raise self._corrupt(entry, "its checksum is not the manifest's")

    def _stream(self, entry: FileEntry) -> Iterator[memoryview]:
        try:
            yield from self.store.stream_file(self._path(entry), entry.bytes)
        except FileNotFoundError:
            raise self._corrupt(entry, f"it is missing, or not of {entry.bytes} bytes") from None

    def _path(self, entry: FileEntry) -> str:
        return f"{folder_of(self.step if entry.in_step is None else entry.in_step)}/{entry.name}"

    def _corrupt(self, entry: FileEntry, why: str) -> _SourceError:
        return _SourceError(f"{self.store.url}/{self._path(entry)} is corrupt: {why}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="varuna export", description="Write a checkpoint's model as one plain safetensors file."
    )
    parser.add_argument(
        "checkpoint", metavar="CKPT", help="a varuna_ckpt_N folder or URL, or a store of them: the newest that is whole"
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="the file to write; with --hf, the folder"
    )
    parser.add_argument(
        "--hf", action="store_true", help="write a folder that from_pretrained of Hugging Face transformers loads"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="with --hf: copy the tokenizer's files from here"
    )
    parser.add_argument(
        "--ema", action="store_true", help="write the moving average of the parameters, which Varuna(..., ema=) keeps"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    try:
        exported = export_model(
            given.checkpoint,
            given.out,
            hf=given.hf,
            tokenizer=given.tokenizer,
            ema=given.ema,
            report=lambda step, fault: _say(f"passed over: {fault}"),
        )
    except (CheckpointError, ValueError) as error:
        _say(str(error))
        return 1
    if given.json:
        sys.stdout.write(json.dumps(vars(exported), indent=2) + "\n")
    else:
        sys.stdout.write(
            f"step {exported.step} of {exported.source}: {exported.tensors} tensors, {exported.bytes} bytes in "
            f"{exported.out}\n"
        )
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"varuna: {line}\n")


if __name__ == "__main__":
    sys.exit(main())
