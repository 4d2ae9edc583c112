"""What can go wrong for a user of the client. Every message is one line: the thing, the value, the way out."""

from __future__ import annotations

EXIT_CODES = {
    "0": "done; of a job that was followed: it succeeded",
    "1": "failed: no manager answers, it refused, there is no such job, a file is wrong; of a followed job: cancelled, "
    "or failed without an exit code of its script",
    "2": "the command line is wrong",
    "130": "interrupted by Ctrl-C",
    "another": "of a followed job that failed: its script's exit code (128 + n where signal n ended it)",
}
"""Of the `varuna` command."""


class VarunaError(Exception):
    """Base of all errors that the `varuna` command shows as one line."""

    exit_code = 1


class UserError(VarunaError):
    """The input is wrong in a way that the client sees by itself."""


class JobEndedError(VarunaError):
    """A watched job did not succeed. `exit_code`: that of its script, as a shell would give it, or 1."""

    def __init__(self, message: str, script_exit_code: int | None) -> None:
        super().__init__(message)
        if script_exit_code is not None and script_exit_code < 0:
            self.exit_code = 128 - script_exit_code  # ended by a signal
        elif script_exit_code:
            self.exit_code = script_exit_code


class UnreachableError(VarunaError):
    """No manager answers at the address."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(
            f"no manager answers at {url} ({cause}): start one with 'varuna manager', "
            "or pass its address with --manager-url or VARUNA_MANAGER_URL"
        )
        self.url = url


class TlsError(VarunaError):
    """What answers at the address is not trusted, or speaks no TLS."""


class RefusedError(VarunaError):
    """The manager answered with an error; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class NotFoundError(RefusedError):
    """The manager knows no such job, VM or log."""

    def __init__(self, message: str) -> None:
        super().__init__(404, message)
