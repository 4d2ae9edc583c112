"""Runs Slurm's command line tools."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from varuna_manager.providers.base import ProviderRefusedError

__all__ = ["SlurmCommands", "ToolAnswer", "make_tool_environment"]

_INHERITED = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SLURM_CONF"}
    | {"MODULEPATH", "MODULESHOME", "LMOD_CMD", "LMOD_DIR", "LMOD_PKG"}
)
"""All that the tools, and with them the jobs, get of the manager's environment. Variables of a job in which the manager
itself runs (SLURM_..., SBATCH_...) would change what they do."""
_LIMIT_S = 60.0
"""Longest time of a call: the tools try for as long as SlurmctldTimeout or more when the controller is away."""


class ToolAnswer(NamedTuple):
    code: int
    output: str
    errors: str

    @property
    def trouble(self) -> str:
        """The last line that it wrote about its failure."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self.code}"


class SlurmCommands:
    """`environment`: of the tools, see `make_tool_environment`."""

    def __init__(self, environment: Mapping[str, str], *, limit_s: float = _LIMIT_S) -> None:
        self._environment = dict(environment)
        self._limit_s = limit_s

    async def run_tool(self, command: Sequence[str], *, text: str = "") -> ToolAnswer:
        """`text`: its standard input. Raises ProviderRefusedError if it cannot be started or does not end in time."""
        name = command[0]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment,
                start_new_session=True,  # Ctrl-C of the manager must not end it in the middle of a submission
            )
        except OSError as error:
            raise ProviderRefusedError(
                f"{name} cannot be started ({error.strerror}): install Slurm's client tools where the manager runs"
            ) from error
        try:
            async with asyncio.timeout(self._limit_s):
                output, errors = await process.communicate(text.encode())
        except TimeoutError:
            raise ProviderRefusedError(f"{name} has not answered within {self._limit_s:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await asyncio.shield(process.wait())
        assert process.returncode is not None
        return ToolAnswer(process.returncode, output.decode(errors="replace"), errors.decode(errors="replace"))

    async def ask_tool(self, command: Sequence[str]) -> str:
        """Its output. Raises ProviderRefusedError, also if it failed."""
        answer = await self.run_tool(command)
        if answer.code:
            raise ProviderRefusedError(f"{command[0]}: {answer.trouble}")
        return answer.output


def make_tool_environment(environ: Mapping[str, str], names: Sequence[str] = ()) -> dict[str, str]:
    """The part of the manager's environment that Slurm's tools get, and these further variables."""
    kept = {name: value for name, value in environ.items() if name in _INHERITED or name in names}
    kept.setdefault("PATH", os.defpath)
    return {**kept, "SLURM_TIME_FORMAT": "%s"}
