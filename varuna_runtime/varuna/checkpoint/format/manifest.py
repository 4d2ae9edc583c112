"""The receipts and the manifest of a checkpoint folder.

The checkpoint of step k lies in `varuna_ckpt_<k>/`. Each rank of generation g writes its files, whose names carry g,
and then its receipt. When all receipts are there, rank 0 creates `manifest.json`, which completes the checkpoint.
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

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.checksum import Checksum

__all__ = [
    "MANIFEST",
    "CheckpointRetention",
    "FileEntry",
    "FileKind",
    "Manifest",
    "RankState",
    "Receipt",
    "SampleCursor",
    "SavedGroup",
    "StateScope",
    "file_generation",
    "merge_files",
    "merge_groups",
    "parse_sealed_document",
    "receipt_name",
    "set_aside_name",
]

MANIFEST = "manifest.json"
_GENERATION = re.compile(r"-g([0-9]+)[.-]")
_SEAL = re.compile(rb',\n "checksum": "([^"]*)"\n\}\Z')
_SEAL_BYTES = 100
"""The end of a document in which the seal is searched; more than a seal takes."""
_UNSEALED_SCHEMA = "varuna.checkpoint/2"
"""An earlier format, which has no checksum."""
_EARLIER_SCHEMAS = ("varuna.checkpoint/3", _UNSEALED_SCHEMA)
"""Earlier formats of manifests: they have no cursor, and refer to no file of an earlier checkpoint."""


def receipt_name(generation: int, rank: int) -> str:
    return f"receipt-g{generation}-r{rank}.json"


def set_aside_name(number: int) -> str:
    """The name of the `number`th manifest (from 1) that was set aside in a folder, because it no longer fits."""
    return f"manifest.set-aside-{number}.json"


def file_generation(name: str) -> int | None:
    """The generation in a file's name; None for the manifest and for files that are not Varuna's."""
    match = _GENERATION.search(name)
    return int(match[1]) if match else None


class SealedDocument(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def to_bytes(self) -> bytes:
        # Python's json, unlike pydantic's, keeps NaN and infinities.
        text = json.dumps(self.model_dump(by_alias=True), indent=1).encode()
        return text.removesuffix(b"\n}") + f',\n "checksum": "{_sum_of(text)}"\n}}'.encode()


AnyDocument = TypeVar("AnyDocument", bound=SealedDocument)


class FileKind(StrEnum):
    PARAMETERS = "parameters"
    """Tensors by parameter (or buffer) name."""
    OPTIMIZER = "optimizer"
    """Tensors by parameter name and state key; the rest of the state is JSON in the file's metadata."""
    STATE = "state"
    """Tensors among the user's states."""
    OPTIONS = "options"
    """Tensors among the options of one rank's parameter groups."""
    RANK_STATE = "rank-state"
    """Tensors among the user's states that differ between ranks."""
    REGISTERED = "registered"
    """Entries of the user's states that are keyed by parameter names; all but tensors is JSON in the metadata."""
    AVERAGE = "average"
    """The moving average of the parameters, by name."""


class StateScope(StrEnum):
    """What a registered state belongs to."""

    AUTO = "auto"
    """Entries keyed by parameter names belong to their sections; the rest to the job if equal on all ranks, else to
    the rank."""
    SECTION = "section"
    """As `AUTO`, but a rest that differs between ranks is refused."""
    RANK = "rank"
    JOB = "job"
    """All ranks get rank 0's."""


class CheckpointRetention(StrEnum):
    """How long a checkpoint stays."""

    AUTOMATIC = "automatic"
    """Saved by Varuna itself; kept until there are newer ones."""
    ROLLING = "rolling"
    """Saved by a script with `keep=`; kept until there are that many newer ones."""
    KEPT = "kept"
    """Requested by a script to stay; never deleted."""


class FileEntry(SealedDocument):
    """One safetensors file of a checkpoint."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    kind: FileKind
    section: int = Field(ge=-1)
    """The section it belongs to; -1: none."""
    holds: tuple[str, ...]
    """Names of the parameters and buffers whose value or optimizer state is in it."""
    bytes: int = Field(ge=0)
    checksum: str
    """In the form of `varuna.checkpoint.format.checksum`."""
    in_step: int | None = Field(default=None, ge=0)
    """The step of the earlier checkpoint in whose folder it lies; None: in the checkpoint's own folder."""
    local: str = ""
    """The URL of the folder on the writer's VM that holds a copy, under the same path; "": no copy."""


class SavedGroup(SealedDocument):
    """A parameter group of an optimizer: of one rank, or, in a manifest, of all ranks where it has the same options."""

    optimizer: str
    """The optimizer's class."""
    position: tuple[int, int]
    """The index of the optimizer among the script's, and of the group in the optimizer."""
    options: dict[str, Any]
    """Encoded as in `varuna.checkpoint.format.encoding`."""
    schedulers: dict[str, Any]
    """For each registered LR scheduler: its values for this group, by path in its state; encoded, too."""
    parameters: tuple[str, ...]


class RankState(SealedDocument):
    """A registered state as some ranks had it, without the entries that lie in files of sections."""

    per: StateScope
    ranks: tuple[int, ...]
    value: Any
    """Encoded as in `varuna.checkpoint.format.encoding`."""
    digest: str
    """Equal for equal states."""
    file: str = ""
    """The file that has its tensors; "": none."""


class Receipt(SealedDocument):
    """Confirms that one rank's files are in the store."""

    schema_: Literal["varuna.checkpoint-receipt/4"] = Field(default="varuna.checkpoint-receipt/4", alias="schema")
    generation: int
    step: int
    rank: int
    world_size: int
    tensors_of: dict[int, int]
    """For each section of the rank's stage: the number of tensors that the stage's replicas write together."""
    files: tuple[FileEntry, ...]
    groups: tuple[SavedGroup, ...] = ()
    """The rank's parameter groups; only in the receipts of replica 0."""
    registered: dict[str, RankState] = Field(default_factory=dict)
    """The user's states on this rank."""
    error: str = ""
    """Why this rank could not write its files, so that this step gets no checkpoint; "": it could."""


class SampleCursor(SealedDocument):
    """The position of training in the stream of samples."""

    samples: int = Field(ge=0)
    """Samples that the steps so far have used; the next step begins after them."""
    global_batch: int = Field(ge=1)
    """Samples of the newest step."""


class Manifest(SealedDocument):
    """The contents of a complete checkpoint."""

    schema_: Literal["varuna.checkpoint/4", "varuna.checkpoint/3", "varuna.checkpoint/2"] = Field(
        default="varuna.checkpoint/4", alias="schema"
    )
    generation: int
    step: int
    """Training steps completed."""
    p: int
    d: int
    """The shape that wrote it; any other may load it."""
    section_count: int
    seed: int
    cursor: SampleCursor | None = None
    """None: samples were not counted, or an earlier version wrote it."""
    optimizer: str | None
    """The optimizer's class (several are joined with ` and `); None when no optimizer state was saved."""
    state: dict[str, Any]
    """`user`, encoded as in `encoding.py`; from an earlier version also rank 0's `optimizer_groups`."""
    groups: tuple[SavedGroup, ...] = ()
    """All ranks' parameter groups, each with the parameters that it had on any rank. Empty: unknown."""
    files: tuple[FileEntry, ...]
    total_bytes: int
    rank_states: dict[str, tuple[RankState, ...]] = Field(default_factory=dict)
    """The user's states that differed between ranks; those equal on all ranks are in `state`."""
    retention: CheckpointRetention | None = None
    """None: an earlier version wrote it, without this field."""
    state_dict: dict[str, str] = Field(default_factory=dict)
    """For each name in the plain model's `state_dict()`: the name under which its value is stored. Empty: unknown."""

    @property
    def is_sealed(self) -> bool:
        """Whether it has a checksum, which was verified."""
        return self.schema_ != _UNSEALED_SCHEMA

    def files_by_name(self, kind: FileKind) -> dict[str, FileEntry]:
        """The file of `kind` that holds each parameter."""
        return {name: entry for entry in self.files if entry.kind is kind for name in entry.holds}


def parse_sealed_document(kind: type[AnyDocument], data: bytes, where: str) -> AnyDocument:
    """Read a receipt or manifest. Raises CheckpointError saying what is wrong with it.

    A manifest of the earlier format is read without a checksum (`Manifest.is_sealed`).
    """
    wanted = kind.model_fields["schema_"].default
    text = _remove_seal(data, where)
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


def _remove_seal(data: bytes, where: str) -> bytes | None:
    """`data` without the checksum at its end; None if there is none. Raises CheckpointError for a wrong one."""
    seal = _SEAL.search(data, max(0, len(data) - _SEAL_BYTES))
    if seal is None:
        return None
    text = data[: seal.start()] + b"\n}"
    found, given = _sum_of(text), seal[1].decode(errors="replace")
    if found != given:
        raise CheckpointError(f"{where} is corrupt: its checksum is {found} instead of {given}")
    return text


def merge_files(receipts: Iterable[Receipt], section_count: int) -> tuple[FileEntry, ...]:
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


def merge_groups(receipts: Iterable[Receipt]) -> tuple[SavedGroup, ...]:
    """The groups of all ranks, equal ones merged. A parameter of several stages is in the group of the first."""
    placed: set[str] = set()
    groups: dict[str, SavedGroup] = {}
    names: dict[str, list[str]] = {}
    for group in (group for receipt in receipts for group in receipt.groups):
        key = json.dumps(group.model_dump(exclude={"parameters"}), sort_keys=True)
        groups.setdefault(key, group)
        own = [name for name in group.parameters if name not in placed]
        names.setdefault(key, []).extend(own)
        placed.update(own)
    return tuple(group.model_copy(update={"parameters": tuple(names[key])}) for key, group in groups.items())
