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
    "Per",
    "RankState",
    "Receipt",
    "Retention",
    "SavedGroup",
    "file_generation",
    "merge",
    "merge_groups",
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
    """Tensors among the user's states."""
    OPTIONS = "options"
    """Tensors among the options of one rank's parameter groups."""
    RANK_STATE = "rank-state"
    """Tensors among the user's states that differ between ranks."""
    REGISTERED = "registered"
    """Entries of the user's states that are keyed by parameter names; what is no tensor is JSON in the metadata."""
    AVERAGE = "average"
    """The moving average of the parameters, by name."""


class Per(StrEnum):
    """What a registered state belongs to."""

    AUTO = "auto"
    """What is keyed by parameter names: their sections. The rest: the job if all ranks have it alike, else the rank."""
    SECTION = "section"
    """As `AUTO`, but a rest that differs is refused."""
    RANK = "rank"
    JOB = "job"
    """Rank 0's is everybody's."""


class Retention(StrEnum):
    """How long a checkpoint stays."""

    AUTOMATIC = "automatic"
    """Nobody asked for it: until there are newer ones."""
    ROLLING = "rolling"
    """A script asked for it with `keep=`: until there are so many newer ones."""
    KEPT = "kept"
    """A script asked for it: for good."""


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


class SavedGroup(_Document):
    """A parameter group of an optimizer: on one rank; or, in a manifest, on all ranks where it has the same options."""

    optimizer: str
    """The optimizer's class."""
    position: tuple[int, int]
    """Of the optimizer among the script's, and of the group in the optimizer."""
    options: dict[str, Any]
    """Encoded as in `varuna.checkpoint.encoding`."""
    schedulers: dict[str, Any]
    """By the name of a registered LR scheduler: what it keeps for this group, by path in its state; encoded, too."""
    parameters: tuple[str, ...]


class RankState(_Document):
    """A registered state, without what lies in files of sections, as some ranks had it."""

    per: Per
    ranks: tuple[int, ...]
    value: Any
    """As in `varuna.checkpoint.encoding`."""
    digest: str
    """Equal for equal states."""
    file: str = ""
    """Which has its tensors; "" for none."""


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
    groups: tuple[SavedGroup, ...] = ()
    """Its parameter groups; of the ranks of replica 0 alone."""
    registered: dict[str, RankState] = Field(default_factory=dict)
    """The user's states as this rank has them."""
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
    """The optimizer's class (of several: joined with ` and `); None when no optimizer state was saved."""
    state: dict[str, Any]
    """`user`, encoded as in `varuna.checkpoint.encoding`; from an earlier version also rank 0's `optimizer_groups`."""
    groups: tuple[SavedGroup, ...] = ()
    """All ranks' parameter groups, each with the parameters that it had on any rank. Empty: unknown."""
    files: tuple[FileEntry, ...]
    total_bytes: int
    rank_states: dict[str, tuple[RankState, ...]] = Field(default_factory=dict)
    """The user's states that differed between ranks; those that all had alike are in `state`."""
    retention: Retention | None = None
    """None: an earlier version wrote it, which did not say."""
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


def merge_groups(receipts: Iterable[Receipt]) -> tuple[SavedGroup, ...]:
    """The groups of all ranks, equal ones made one. A parameter of several stages is in the group of the first."""
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
