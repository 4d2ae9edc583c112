"""docs/rest.md, from the API's description:

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

A manager answers under `/api/v1`. It has its description at `/openapi.json`, and a page to try requests on at `/docs`.
`make docs` makes this page from the description.

"""
_RULES = """

`varuna_client` has typed methods, synchronous (`Client`) and asynchronous (`AsyncClient`), for all that the `varuna`
command does. Both repeat a request that the manager did not answer if repeating is safe, find the manager that leads,
and follow pages.

    from varuna_client import Client

    with Client("http://127.0.0.1:8750") as client:
        for job in client.jobs(state=["running"]):
            print(job["name"], job["step"], job["loss"])
        for kind, document in client.stream(after=0):
            print(kind, document)

**Pages.** One answer has at most `limit` entries; if there are more, the header `Link` has the next page's address.

**Changes.** [security.md](security.md) says which role may make which. `POST /jobs` takes an `Idempotency-Key`. A job's
`ETag` changes with its state, its spec and the reason of the last decision; `PATCH` takes it as `If-Match`, and answers
412 if the job has changed.

**The stream.** `GET /events/stream` sends server-sent events: each stored event with its number as `id`, so that
`Last-Event-ID` resumes a broken stream; the `progress` of each job at most once a second; a comment every 15 s of
silence. A browser's `EventSource` cannot send a token: use `fetch`. A reader that reads nothing for 30 s is cut off. A
manager that does not lead answers 503, and its problem document names the `leader`.

**Logs.** `GET /jobs/{job}/logs` answers bytes; the header `Log-Next-Offset` is the `offset` of the next request. With
`wait_s` the manager waits for more before it answers, so that following a log transfers only its bytes.

**Many steps.** `/metrics/buckets` sums up any number of steps in as many buckets as a chart has points. A million steps
take no longer than ten thousand.

## Problems

| status | type | title |
| --- | --- | --- |
"""


class _NoServices:
    """Stands for the services of an application that gets no requests."""

    def __getattr__(self, name: str) -> _NoServices:
        return self


def make_description() -> dict[str, Any]:
    """The API's description (OpenAPI), without a manager."""
    return make_app(cast(Services, _NoServices())).openapi()


def render_page(api: Mapping[str, Any]) -> str:
    """The API's description as Markdown."""
    schemas = api["components"]["schemas"]
    text: str = _HEAD + api["info"]["description"] + _RULES
    text += "".join(f"| {status} | `{slug}` | {title} |\n" for status, slug, title in problems.kinds())
    for tag in api["tags"]:
        text += f"\n## {tag['name'].capitalize()}\n\n{tag['description']}\n"
        for path, calls in api["paths"].items():
            for method, call in calls.items():
                if tag["name"] in call["tags"]:
                    text += "".join(_render_call(method.upper(), path, call))
    text += "\n## Documents\n"
    for name in sorted(schemas):
        text += "".join(_render_schema(name, schemas[name]))
    return text


def _render_call(method: str, path: str, call: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n### {method} {path.removeprefix('/api/v1')}\n\n"
    if call.get("description"):
        yield f"{call['description']}\n\n"
    for parameter in call.get("parameters", ()):
        schema = parameter["schema"]
        text = parameter.get("description") or schema.get("description") or ""
        default = f" (default {json.dumps(schema['default'])})" if schema.get("default") is not None else ""
        kind = f"{parameter['in']}, {_render_type(schema)}"
        yield f"- `{parameter['name']}` ({kind}){': ' + text if text else ''}{default}\n"
    for media, content in call.get("requestBody", {}).get("content", {}).items():
        yield f"- body: {_render_type(content['schema'])}{'' if media == 'application/json' else f', {media}'}\n"
    good = next(status for status in call["responses"] if status.startswith("2"))
    answers = call["responses"][good].get("content", {})
    for media, content in answers.items():
        shown = _render_type(content.get("schema", {}))
        yield f"- answers {good}: {shown}{'' if media == 'application/json' else f', {media}'}\n"


def _render_schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n### {name}\n\n"
    if schema.get("description"):
        yield f"{' '.join(schema['description'].split())}\n\n"
    if "enum" in schema:
        yield ", ".join(f"`{value}`" for value in schema["enum"]) + "\n"
    for field, kind in schema.get("properties", {}).items():
        text = kind.get("description")
        yield f"- `{field}`: {_render_type(kind)}{'. ' + ' '.join(text.split()) if text else ''}\n"
    if schema.get("examples"):
        yield f"\n```json\n{json.dumps(schema['examples'][0], indent=2, ensure_ascii=False)}\n```\n"


def _render_type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_render_type(each) for each in schema["anyOf"])
    if "prefixItems" in schema:
        return f"[{', '.join(_render_type(each) for each in schema['prefixItems'])}]"
    kind = schema.get("type", "anything")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return f"list of {_render_type(schema.get('items', {}))}"
    if "enum" in schema and len(schema["enum"]) <= 8:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    return str(schema.get("format") or kind)


if __name__ == "__main__":
    sys.stdout.write(render_page(make_description()))
