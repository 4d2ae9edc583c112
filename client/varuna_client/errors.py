"""What can go wrong for a user of the client. Every message is one line: the thing, the value, the way out."""

from __future__ import annotations

EXIT_CODES = {
    "0": "done; for a followed job: it succeeded",
    "1": "failed: no manager answers, it refused, there is no such job, a file is wrong; for a followed job: "
    "cancelled, or failed without an exit code of its script",
    "2": "the command line is wrong",
    "130": "interrupted by Ctrl-C",
    "another": "for a followed job that failed: its script's exit code (128 + n if signal n ended it)",
}
"""The exit codes of the `varuna` command."""


class VarunaError(Exception):
    """The base of all errors that the `varuna` command shows as one line."""

    exit_code = 1


class UserError(VarunaError):
    """The client rejects the input without asking the manager."""


class JobEndedError(VarunaError):
    """A watched job did not succeed. `exit_code`: its script's, as a shell reports it, or 1."""

    def __init__(self, message: str, script_exit_code: int | None) -> None:
        super().__init__(message)
        if script_exit_code is not None and script_exit_code < 0:
            self.exit_code = 128 - script_exit_code  # ended by a signal
        elif script_exit_code:
            self.exit_code = script_exit_code


class UnreachableError(VarunaError):
    """No manager answers at the address."""

    def __init__(self, url: str, cause: str, unknown: str = "") -> None:
        """`unknown`: what the call may have done all the same, and how to find out; empty: nothing."""
        super().__init__(self._describe(url, cause) + (f"; {unknown}" if unknown else ""))
        self.url = url

    def _describe(self, url: str, cause: str) -> str:
        return (
            f"no manager answers at {url} ({cause}): start one with 'varuna manager', "
            "or pass its address with --manager-url or VARUNA_MANAGER_URL"
        )


class NoAnswerError(UnreachableError):
    """A manager takes the call, but does not answer in time."""

    def _describe(self, url: str, cause: str) -> str:
        return (
            f"the manager at {url} took the call and has not answered ({cause}): it is slow or stands still; "
            "try again, or see its log"
        )


class TlsError(VarunaError):
    """The server at the address is not trusted, or does not use TLS."""


class RefusedError(VarunaError):
    """The manager answered with an error; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class NotFoundError(RefusedError):
    """The manager knows no such job, VM or log."""

    def __init__(self, message: str) -> None:
        super().__init__(404, message)
