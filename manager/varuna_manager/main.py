"""The `varuna manager` command: settings from flags and environment, logging, and the process itself."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import get_args

import structlog
from pydantic import ValidationError

from varuna_manager.db.engine import StoreAwayError
from varuna_manager.errors import StartError
from varuna_manager.server.process import run
from varuna_manager.settings import ManagerSettings

__all__ = ["ManagerSettings", "StartError", "main", "run", "serve"]

INTERRUPTED = 130


def serve(settings: ManagerSettings) -> int:
    """Run the manager until it gets a stop signal; return the exit status. A failed start writes one line to stderr."""
    _configure_logging(settings.log_level, as_text=settings.logs_text)
    collect_garbage_rarely()
    try:
        asyncio.run(run(settings))
    except (StartError, StoreAwayError) as error:
        sys.stderr.write(f"varuna manager: {error}\n")
        return 1
    except KeyboardInterrupt:  # it had not started
        return INTERRUPTED
    return 0


def collect_garbage_rarely() -> None:
    """Make garbage collections rare. A full one stops the thread that answers heartbeats for 0.2 s, and with Python's
    default thresholds every round of decisions about a large fleet starts one. Imported objects are never searched."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)


def _configure_logging(level: str, *, as_text: bool) -> None:
    number = logging.getLevelNamesMapping()[level.upper()]
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if as_text:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    # gRPC would write a line for each refused handshake, so that anybody who reaches the port could fill the disk.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def _make_parser() -> argparse.ArgumentParser:
    """One flag per setting."""
    parser = argparse.ArgumentParser(prog="varuna manager", description="Train jobs on whatever VMs there are.")
    for name, field in ManagerSettings.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        default = "" if field.default in (None, "") else f" (default: {field.default})"
        text = f"{field.description}{default}"
        if bool in (field.annotation, *get_args(field.annotation)):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            kinds = [kind.__name__ for kind in get_args(field.annotation) if kind is not type(None)]
            metavar = (kinds or [getattr(field.annotation, "__name__", "value")])[0].upper()
            parser.add_argument(flag, metavar=metavar, help=text)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Settings come from flags, then the environment, then the defaults."""
    given = {name: value for name, value in vars(_make_parser().parse_args(arguments)).items() if value is not None}
    if "agent_command" in given:
        given["agent_command"] = json.loads(given["agent_command"])
    try:
        settings = ManagerSettings(**given)
    except ValidationError as error:
        for entry in error.errors():
            flag = "--" + ".".join(map(str, entry["loc"])).replace("_", "-")
            message = str(entry["msg"]).removeprefix("Value error, ")
            sys.stderr.write(f"varuna manager: {flag} {entry['input']!r}: {message}\n")
        return 2
    return serve(settings)


if __name__ == "__main__":
    sys.exit(main())
