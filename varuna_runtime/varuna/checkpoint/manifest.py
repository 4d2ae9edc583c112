"""What a checkpoint folder's receipts and manifest say.

A checkpoint of step k lies in `varuna_ckpt_<k>/`. Each rank of generation g writes its files, whose names carry g, and
then its receipt. When every rank's receipt is there, rank 0 creates `manifest.json`: from then on it is a checkpoint.
Files of another generation that stopped half-way may lie beside them; the manifest does not name those.

A receipt or manifest is JSON whose last field is the checksum of the text without that field.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from varuna.checkpoint.checksum import Checksum
from varuna.checkpoint.errors import CheckpointError

__all__ = [
    "MANIFEST",
    "Cursor",
    "FileEntry",
    "FileKind",
    "Manifest",
    "Receipt",
    "file_generation",
    "merge",
    "parse",
    "receipt_name",
    "set_aside_name",
]

MANIFEST = "manifest.json"
_GENERATION = re.compile(r"-g([0-9]+)[.-]")
_SEAL = re.compile(rb',\n "checksum": "([^"]*)"\n\}\Z')
_SEAL_BYTES = 100
"""At the end of a document; more than a seal has."""
_UNSEALED_SCHEMA = "varuna.checkpoint/2"
"""A format before: it has no checksum."""
_EARLIER_SCHEMAS = ("varuna.checkpoint/3", _UNSEALED_SCHEMA)
"""Of manifests; they have no cursor, and refer to no file of an earlier checkpoint."""


def receipt_name(generation: int, rank: int) -> str:
    return f"receipt-g{generation}-r{rank}.json"


def set_aside_name(number: int) -> str:
    """The `number`th manifest of a folder (from 1) that was set aside, since its checkpoint fits no longer."""
    return f"manifest.set-aside-{number}.json"


def file_generation(name: str) -> int | None:
    """The generation that a file's name carries; None for the manifest and strangers."""
    match = _GENERATION.search(name)
    return int(match[1]) if match else None


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def to_bytes(self) -> bytes:
        # Python's json, unlike pydantic's, keeps NaN and infinities.
        text = json.dumps(self.model_dump(by_alias=True), indent=1).encode()
        return text.removesuffix(b"\n}") + f',\n "checksum": "{_sum_of(text)}"\n}}'.encode()


Document = TypeVar("Document", bound=_Document)


class FileKind(StrEnum):
    PARAMETERS = "parameters"
    """Tensors by parameter (or buffer) name."""
    OPTIMIZER = "optimizer"
    """Tensors by parameter name and state key; the rest of the state is JSON in the file's metadata."""
    STATE = "state"
    """Tensors among the user's states and the optimizer's options."""


class FileEntry(_Document):
    """One safetensors file of a checkpoint."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    kind: FileKind
    section: int = Field(ge=-1)
    """The section it belongs to; -1 for what belongs to none."""
    holds: tuple[str, ...]
    """Names of the parameters and buffers whose value or optimizer state is in it."""
    bytes: int = Field(ge=0)
    checksum: str
    """As `varuna.checkpoint.checksum` writes it."""
    in_step: int | None = Field(default=None, ge=0)
    """The step in whose folder it lies, when that is an earlier checkpoint's; None: in the checkpoint's own."""
    local: str = ""
    """Where its writer has kept a copy: the URL of a folder of its VM, with the same folders and names in it; or ""."""


class Receipt(_Document):
    """One rank's word that its files are in the store."""

    schema_: Literal["varuna.checkpoint-receipt/4"] = Field(default="varuna.checkpoint-receipt/4", alias="schema")
    generation: int
    step: int
    rank: int
    world_size: int
    tensors_of: dict[int, int]
    """For each section of its stage: how many tensors the stage's replicas write together."""
    files: tuple[FileEntry, ...]
    error: str = ""
    """Why this rank could not write its files: there will be no checkpoint of this step."""


class Cursor(_Document):
    """Where training is in the stream of samples."""

    samples: int = Field(ge=0)
    """Those that the steps so far have used: the next step begins with the one after."""
    global_batch: int = Field(ge=1)
    """Samples of the newest step."""


class Manifest(_Document):
    """What a complete checkpoint consists of."""

    schema_: Literal["varuna.checkpoint/4", "varuna.checkpoint/3", "varuna.checkpoint/2"] = Field(
        default="varuna.checkpoint/4", alias="schema"
    )
    generation: int
    step: int
    """Training steps behind the state."""
    p: int
    d: int
    """The shape that wrote it; any other may load it."""
    section_count: int
    seed: int
    cursor: Cursor | None = None
    """None: nobody counted, or an earlier version wrote it."""
    optimizer: str | None
    """The optimizer's class; None when no optimizer state was saved."""
    state: dict[str, Any]
    """`user` and `optimizer_groups`, encoded as in `varuna.checkpoint.encoding`."""
    files: tuple[FileEntry, ...]
    total_bytes: int
    state_dict: dict[str, str] = Field(default_factory=dict)
    """For each name in the plain model's `state_dict()`: the name under which its value is stored. Empty: unknown."""

    @property
    def is_sealed(self) -> bool:
        """Whether it has a checksum, which then was right."""
        return self.schema_ != _UNSEALED_SCHEMA

    def by_name(self, kind: FileKind) -> dict[str, FileEntry]:
        """The file of `kind` that holds each parameter."""
        return {name: entry for entry in self.files if entry.kind is kind for name in entry.holds}


def parse(kind: type[Document], data: bytes, where: str) -> Document:
    """Read a receipt or manifest. Raises CheckpointError saying what is wrong with it.

    A manifest of the earlier format has no checksum, and is read without (`Manifest.is_sealed`).
    """
    wanted = kind.model_fields["schema_"].default
    text = _unsealed(data, where)
    try:
        document = json.loads(data if text is None else text)
        if isinstance(document, dict):
            schema = document.get("schema", wanted)
            if schema not in (wanted, *_EARLIER_SCHEMAS):
                raise CheckpointError(f"{where} is of the format {schema}; this version reads {wanted}")
            if text is None and schema != _UNSEALED_SCHEMA:
                raise CheckpointError(f"{where} is corrupt: it does not end with its checksum")
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{where}: field {field}: {first['msg']}") from None
    except ValueError as error:
        raise CheckpointError(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{where} is nested more deeply than anything that a checkpoint holds") from None


def _sum_of(text: bytes) -> str:
    checksum = Checksum()
    checksum.update(text)
    return str(checksum)


def _unsealed(data: bytes, where: str) -> bytes | None:
    """The text whose checksum `data` ends with; None when it ends with none. Raises CheckpointError for a wrong one."""
    seal = _SEAL.search(data, max(0, len(data) - _SEAL_BYTES))
    if seal is None:
        return None
    text = data[: seal.start()] + b"\n}"
    found, given = _sum_of(text), seal[1].decode(errors="replace")
    if found != given:
        raise CheckpointError(f"{where} is corrupt: its checksum is {found} instead of {given}")
    return text


def merge(receipts: Iterable[Receipt], section_count: int) -> tuple[FileEntry, ...]:
    """The files of all ranks, by section. Raises CheckpointError unless every tensor was written exactly once."""
    files: list[FileEntry] = []
    owed: dict[int, int] = {}
    writer: dict[str, int] = {}
    written: Counter[int] = Counter()
    for receipt in receipts:
        owed |= receipt.tensors_of
        files.extend(receipt.files)
        for entry in receipt.files:
            for name in entry.holds if entry.kind is FileKind.PARAMETERS else ():
                if name in writer:
                    raise CheckpointError(f"{name} was written by rank {writer[name]} and by rank {receipt.rank}")
                writer[name] = receipt.rank
                written[entry.section] += 1
    missing = [section for section in range(section_count) if section not in owed]
    if missing:
        raise CheckpointError(f"no rank wrote section {missing[0]} of {section_count} (and {len(missing) - 1} more)")
    for section, tensors in sorted(owed.items()):
        if written[section] != tensors:
            raise CheckpointError(f"of section {section}, {written[section]} of {tensors} tensors were written")
    return tuple(sorted(files, key=lambda entry: (entry.section, entry.name)))
