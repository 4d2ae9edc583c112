"""Writes docs/python.md from the code's signatures and docstrings: `python -m varuna_client.reference.python`.

The code is read, not imported: `varuna` needs PyTorch, which this package does without.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MODULES = ("varuna", "varuna.data", "varuna_client")
"""Their `__all__` is what is documented."""
_HEAD = """\
# Python API

Written by `make docs` from the code's signatures and docstrings. [Writing a training script](training-script.md) shows
how they go together, and the [REST API](rest.md) what the documents hold that the client gives.
"""
_WIDTH = 100
_SECTION = re.compile(r"(Args|Returns|Raises):")
_ITEM = re.compile(r"([\w.*]+(?:, [\w.*]+)*): (.*)")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """A name's definition, and the module in whose text it is."""

    module: str
    node: ast.ClassDef | Function | ast.Module | ast.expr


def page() -> str:
    """The page's text."""
    return "\n".join([_HEAD, *(line for module in MODULES for line in _module(module))])


def _module(module: str) -> Iterator[str]:
    summary = (ast.get_docstring(_tree(module)) or "").split("\n\n")[0]
    yield from (f"## {module}", "", summary, "")
    for name in public_names(module):
        found = definition(module, name)
        if isinstance(found.node, ast.Module):
            yield from (f"### {name}", "", f"The module [`{found.module}`](#{found.module.replace('.', '')}).", "")
        elif isinstance(found.node, ast.ClassDef):
            yield from _class(name, found)
        elif isinstance(found.node, Function):
            yield from (f"### {name}", "", *_function(found.node))
        else:
            yield from (f"### {name}", "", f"`{ast.unparse(found.node)}`", "")


def _class(name: str, found: Found) -> Iterator[str]:
    assert isinstance(found.node, ast.ClassDef)
    yield from (f"### {name}", "")
    own = [node for node in found.node.body if isinstance(node, Function)]
    begin = [node for node in own if node.name == "__init__"]
    if begin:
        yield from _block(_signature(begin[0], name, returns=""))
    yield from _prose(ast.get_docstring(found.node) or "")
    awaited = False
    for node in found.node.body:
        if isinstance(node, Function) and not node.name.startswith("_") and ast.get_docstring(node):
            yield from (f"#### {name}.{node.name}", "", *_function(node))
        made_by = _made_of_call(node)
        if made_by is not None and made_by[0] == "_make_method":
            call = definition("varuna_client.rest.calls", made_by[2]).node
            assert isinstance(call, Function)
            yield from (f"#### {name}.{made_by[1]}", "", *_function(call, made_by[1]))
        awaited |= made_by is not None and made_by[0] == "_make_async_method"
    if awaited:
        yield from ("All other calls are those of `Client`, to be awaited.", "")


def _made_of_call(node: ast.stmt) -> tuple[str, str, str] | None:
    """(maker, method, call) of `method = maker(calls.call)`."""
    match node:
        case ast.Assign(
            targets=[ast.Name(id=method)],
            value=ast.Call(
                func=ast.Name(id="_make_method" | "_make_async_method" as maker), args=[ast.Attribute(attr=call)]
            ),
        ):
            return maker, method, call
    return None


def _function(node: Function, name: str | None = None) -> Iterator[str]:
    returns = "" if node.returns is None else ast.unparse(node.returns)
    returns = re.sub(r"^ApiCall\[(.*)\]$", r"\1", returns)
    if any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list):
        yield from _block(f"{name or node.name}: {returns}")
    else:
        prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
        yield from _block(prefix + _signature(node, name or node.name, returns))
    yield from _prose(ast.get_docstring(node) or "")


def _signature(node: Function, name: str, returns: str) -> str:
    parts = list(_parts(node.args))
    if parts[:1] == ["self"]:
        parts = parts[2:] if parts[1:2] == ["/"] else parts[1:]
    arrow = f" -> {returns}" if returns else ""
    line = f"{name}({', '.join(parts)}){arrow}"
    if len(line) <= _WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){arrow}"


def _parts(args: ast.arguments) -> Iterator[str]:
    """The arguments one by one, as they would be written."""
    plain = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    for number, (arg, default) in enumerate(zip(plain, defaults, strict=True), 1):
        yield _argument(arg, default)
        if number == len(args.posonlyargs):
            yield "/"
    if args.vararg is not None:
        yield "*" + ast.unparse(args.vararg)
    elif args.kwonlyargs:
        yield "*"
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _argument(arg, default)
    if args.kwarg is not None:
        yield "**" + ast.unparse(args.kwarg)


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(arg) + ("" if default is None else f" = {ast.unparse(default)}")


# ---------------------------------------------------------------- docstrings


def _block(text: str) -> Iterator[str]:
    yield from ("```text", text, "```", "")


def _prose(docstring: str) -> Iterator[str]:
    """As Markdown: what stands under Args, Returns and Raises becomes a list."""
    for paragraph in filter(None, re.split(r"\n\s*\n", inspect.cleandoc(docstring))):
        lines = paragraph.split("\n")
        if _SECTION.fullmatch(lines[0]):
            yield from (f"**{lines[0][:-1]}**", "", *_items(inspect.cleandoc("\n".join(["", *lines[1:]]))), "")
        elif all(line.startswith("    ") for line in lines):
            yield from _block(inspect.cleandoc(paragraph))
        else:
            yield from (paragraph, "")


def _items(text: str) -> Iterator[str]:
    is_list = False
    for line in text.split("\n"):
        match = _ITEM.fullmatch(line)
        if match:
            is_list = True
            names = ", ".join(f"`{name}`" for name in match[1].split(", "))
            yield f"- {names}: {match[2]}"
        else:
            yield f"  {line.strip()}" if is_list else line.strip()


# ---------------------------------------------------------------- where things are


@cache
def _tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"there is no module {module}")
    return ast.parse(Path(spec.origin).read_text())


def public_names(module: str) -> list[str]:
    """The module's `__all__`."""
    for node in _tree(module).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                names: list[str] = ast.literal_eval(value)
                return names
    raise ValueError(f"module {module} has no __all__: what is public in it?")


def definition(module: str, name: str) -> Found:
    """Where the name is defined, through imports. Raises ValueError when it is nowhere."""
    for node in ast.walk(_tree(module)):
        match node:
            case ast.ImportFrom(module=str(origin), names=names) if name in [one.asname or one.name for one in names]:
                if origin == module:  # its submodule
                    return Found(f"{module}.{name}", _tree(f"{module}.{name}"))
                return definition(origin, name)
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == name:
                return Found(module, node)
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return Found(module, value)
    raise ValueError(f"module {module} has no {name}")


if __name__ == "__main__":
    sys.stdout.write(page())
