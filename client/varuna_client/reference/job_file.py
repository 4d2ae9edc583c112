"""Writes docs/job-file.md from the job files' schema: `make docs`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

from varuna_client.jobfile.schema import Schema, job_schema

EXAMPLE = """\
name: bert-large
workdir: .                           # the folder of this file
setup: pip install -r requirements.txt
run: python train.py --data "$DATA" --steps 10000
global_batch: 1024                   # on 8 GPUs as on 64
steps: 10000
env:
  DATA: s3://bucket/corpus/train.npy
  VARUNA_TENSORBOARD: /shared/curves/bert-large
setup_timeout_s: 1800                # then the setup has failed on that VM
secrets:
  WANDB_API_KEY: file:wandb          # the manager has the file
resources:
  min_gpus: 8
  max_gpus: 64
  gpu_type: A100
  min_gpu_memory_gib: 40
vm_limits:
  memory_gib: 480
  cpus: 90
  processes: 16384
checkpoint:
  url: s3://bucket/checkpoints/bert-large
  interval_s: 600
plan:                                # pins: the planner chooses what is not given
  micro_batch: 4
copies: auto                         # in other VMs' memory: auto, on or off
on_nonfinite: stop                   # at a NaN or infinite loss: skip, stop or go_on
priority: 10
max_restarts_on_errors: 2
limits:
  max_duration_s: 604800             # a week
  max_cost: 40000
  queue_timeout_s: 3600
labels:
  team: language
"""
_HEAD = """\
# The job file

Written by `make docs` from the [JSON Schema](job.schema.json) of job files, which editors can check them with while you
type; `varuna validate JOB.yaml` checks a file, and names the lines that are wrong. What comes of the settings is in
[Jobs](jobs.md). Needed are `run` and `global_batch`; a file with all there is:

```yaml
{example}```

## Settings
"""
_TAIL = """
A key that is not here, or is there twice, is an error. Over REST, and
for `Client.submit`, the same document is sent as JSON, with an absolute `workdir`, or with `archive`, the SHA-256 of a
[packed one](jobs.md#your-code-on-every-vm), in place of `copy_workdir` ([REST](rest.md)).
"""


_IF_LEFT_OUT = re.compile(r"; (?:null|if left out): ")


def page() -> str:
    """The page's text."""
    schema = job_schema()
    lines = [_HEAD.replace("{example}", EXAMPLE), *_table(schema, schema)]
    for name, part in schema["properties"].items():
        if "$ref" in part:
            inner = _followed(part, schema)
            lines += ["", f"### {name}", "", _sentence(part["description"]), "", *_table(inner, schema)]
    return "\n".join(lines) + "\n" + _TAIL


def _table(of: Schema, schema: Schema) -> Iterator[str]:
    needed = of.get("required", ())
    yield "| key | value | if left out | |"
    yield "| --- | --- | --- | --- |"
    for name, part in of["properties"].items():
        linked = f"[`{name}`](#{name})" if "$ref" in part else f"`{name}`"
        meaning, *otherwise = _IF_LEFT_OUT.split(part["description"])
        default = "needed" if name in needed else " ".join(otherwise) or _default(part)
        yield f"| {linked} | {_kind(part, schema)} | {default} | {meaning} |"


def _followed(part: Schema, schema: Schema) -> Schema:
    found: Schema = schema["$defs"][part["$ref"].rpartition("/")[2]]
    return found


def _kind(part: Schema, schema: Schema) -> str:
    """What the value may be, in words."""
    if "$ref" in part:
        return "mapping of " + ", ".join(f"`{key}`" for key in _followed(part, schema)["properties"])
    if "enum" in part:
        *first, last = (f"`{value}`" for value in part["enum"])
        return f"{', '.join(first)} or {last}"
    (real,) = [one for one in part.get("anyOf", [part]) if one.get("type") != "null"]
    words = {
        "string": "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "`true` or `false`",
        "object": "mapping of text to text",
    }[real["type"]]
    low, high, above = real.get("minimum"), real.get("maximum"), real.get("exclusiveMinimum")
    if high is not None and above is not None:
        return f"{words} above {above}, at most {high}"
    if high is not None:
        return f"{words}, {low} to {high}"
    if low is not None:
        return f"{words}, {low} or more"
    return words if above is None else f"{words} above {above}"


def _default(part: Schema) -> str:
    default = part.get("default")
    return "" if default is None or "$ref" in part else f"`{json.dumps(default).strip(chr(34))}`"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


if __name__ == "__main__":
    sys.stdout.write(page())
