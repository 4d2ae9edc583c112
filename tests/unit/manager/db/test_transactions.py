"""No network call is made inside a transaction: code there awaits only the session's own work."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import varuna_manager

ROOT = Path(varuna_manager.__file__).parent


def transactions(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(name of the session, code that runs in its transaction): `write` blocks, and functions that take a session."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncWith):
            for item in node.items:
                is_write = isinstance(item.context_expr, ast.Call) and ast.unparse(item.context_expr.func).endswith(
                    ".write"
                )
                if is_write and isinstance(item.optional_vars, ast.Name):
                    yield from ((item.optional_vars.id, statement) for statement in node.body)
        elif isinstance(node, ast.AsyncFunctionDef):
            for argument in node.args.args:
                if argument.annotation is not None and ast.unparse(argument.annotation) == "AsyncSession":
                    yield from ((argument.arg, statement) for statement in node.body)


def foreign_awaits(session: str, code: ast.AST) -> Iterator[ast.Await]:
    """Calls that are awaited and are neither methods of the session nor get it as an argument."""
    for node in ast.walk(code):
        if isinstance(node, ast.Await):
            names = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
            if session not in names:
                yield node


def test_only_the_session_is_awaited_inside_a_transaction() -> None:
    checked, found = 0, []
    for path in sorted(ROOT.rglob("*.py")):
        for session, code in transactions(ast.parse(path.read_text())):
            checked += 1
            found += [
                f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}" for node in foreign_awaits(session, code)
            ]
    assert checked > 50
    assert found == []


def test_a_call_of_something_else_is_found() -> None:
    code = """
async def create(self):
    async with self._database.write() as session:
        row = await session.get(Row, 1)
        await note(session, row)
        await self._provider.create()
"""
    (found,) = [one for session, body in transactions(ast.parse(code)) for one in foreign_awaits(session, body)]
    assert ast.unparse(found) == "await self._provider.create()"


def test_the_store_is_written_through_one_door() -> None:
    """The World follows what goes through `Database.write`; nothing else opens a transaction or an engine."""
    transactions = ("session.begin", "engine.begin", "connection.begin", "session.commit", "connection.commit")
    engines = ("AsyncSession", "async_sessionmaker", "create_engine", "create_async_engine")
    doors = transactions + engines
    found = set()
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(doors):
                found.add(str(path.relative_to(ROOT)))
    assert found == {"db/engine.py"}
