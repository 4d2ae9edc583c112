"""docs/rest.md, from the API's own description:

python -m varuna_manager.api.http.reference > docs/rest.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

from varuna_manager.api.http import problems
from varuna_manager.api.http.app import Services, make_app

_HEAD = """\
# REST API

A manager answers under `/api/v1`. Its own description is at `/openapi.json`, and as a page to try calls on at `/docs`.
This page is made from it by `make docs`.

"""
_RULES = """

`varuna_client` has a typed client for each call, synchronous (`Client`) and asynchronous (`AsyncClient`): both send
what may be sent twice again when the manager does not answer, go on to the manager that leads, and follow pages.

    from varuna_client import Client

    with Client("http://127.0.0.1:8750") as client:
        for job in client.jobs(state=["running"]):
            print(job["name"], job["step"], job["loss"])
        for kind, document in client.stream(after=0):
            print(kind, document)

**Pages.** `limit` is the most that one answer has; where there is more, the header `Link` has the next page's address.

**Changes.** Who may make them is in [security.md](security.md). `POST /jobs` takes an `Idempotency-Key`. A job's `ETag`
changes with its state, its spec and the reason of the last decision; `PATCH` takes it as `If-Match`, and answers 412
when the job has changed.

**The stream.** `GET /events/stream` speaks server-sent events: each stored event with its number as `id`, so that
`Last-Event-ID` goes on where a stream broke; `progress` of each job at most once a second; a comment each 15 s.
`EventSource` of browsers sends no token: use `fetch`. A reader that takes nothing for 30 s is cut off. A manager that
does not lead answers 503, and its problem names the `leader`.

**Logs.** `GET /jobs/{job}/logs` answers bytes; `Log-Next-Offset` says where to go on. With `wait_s` the answer waits
for more, so that following a log costs no more than its bytes.

**Many steps.** `/metrics/buckets` sums up any number of steps in as many buckets as a chart has points: a million steps
take as long as ten thousand.

## Problems

| status | type | title |
| --- | --- | --- |
"""


class _Nothing:
    """Services of an application that nobody calls."""

    def __getattr__(self, name: str) -> _Nothing:
        return self


def description() -> dict[str, Any]:
    """The API's description (OpenAPI), without a manager."""
    return make_app(cast(Services, _Nothing())).openapi()


def page(api: Mapping[str, Any]) -> str:
    """The API's description as Markdown."""
    schemas = api["components"]["schemas"]
    text: str = _HEAD + api["info"]["description"] + _RULES
    text += "".join(f"| {status} | `{slug}` | {title} |\n" for status, slug, title in problems.kinds())
    for tag in api["tags"]:
        text += f"\n## {tag['name'].capitalize()}\n\n{tag['description']}\n"
        for path, calls in api["paths"].items():
            for method, call in calls.items():
                if tag["name"] in call["tags"]:
                    text += "".join(_call(method.upper(), path, call))
    text += "\n## Documents\n"
    for name in sorted(schemas):
        text += "".join(_schema(name, schemas[name]))
    return text


def _call(method: str, path: str, call: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n### {method} {path.removeprefix('/api/v1')}\n\n"
    if call.get("description"):
        yield f"{call['description']}\n\n"
    for parameter in call.get("parameters", ()):
        schema = parameter["schema"]
        told = parameter.get("description") or schema.get("description") or ""
        default = f" (default {json.dumps(schema['default'])})" if schema.get("default") is not None else ""
        yield f"- `{parameter['name']}` ({parameter['in']}, {_type(schema)}){': ' + told if told else ''}{default}\n"
    for media, content in call.get("requestBody", {}).get("content", {}).items():
        yield f"- body: {_type(content['schema'])}{'' if media == 'application/json' else f', {media}'}\n"
    good = next(status for status in call["responses"] if status.startswith("2"))
    answers = call["responses"][good].get("content", {})
    for media, content in answers.items():
        shown = _type(content.get("schema", {}))
        yield f"- answers {good}: {shown}{'' if media == 'application/json' else f', {media}'}\n"


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n### {name}\n\n"
    if schema.get("description"):
        yield f"{' '.join(schema['description'].split())}\n\n"
    if "enum" in schema:
        yield ", ".join(f"`{value}`" for value in schema["enum"]) + "\n"
    for field, kind in schema.get("properties", {}).items():
        told = kind.get("description")
        yield f"- `{field}`: {_type(kind)}{'. ' + ' '.join(told.split()) if told else ''}\n"
    if schema.get("examples"):
        yield f"\n```json\n{json.dumps(schema['examples'][0], indent=2, ensure_ascii=False)}\n```\n"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "prefixItems" in schema:
        return f"[{', '.join(_type(each) for each in schema['prefixItems'])}]"
    kind = schema.get("type", "anything")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if "enum" in schema and len(schema["enum"]) <= 8:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    return str(schema.get("format") or kind)


if __name__ == "__main__":
    sys.stdout.write(page(description()))
