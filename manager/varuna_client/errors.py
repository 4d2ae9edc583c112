"""What can go wrong for a user of the client. Every message is one line: the thing, the value, the way out."""

from __future__ import annotations


class VarunaError(Exception):
    """Base of all errors that the `varuna` command shows as one line."""


class UserError(VarunaError):
    """The input is wrong in a way that the client sees by itself."""


class UnreachableError(VarunaError):
    """No manager answers at the address."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(
            f"no manager answers at {url} ({cause}): start one with 'varuna manager', "
            "or pass its address with --manager-url or VARUNA_MANAGER_URL"
        )
        self.url = url


class RefusedError(VarunaError):
    """The manager answered with an error; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class NotFoundError(RefusedError):
    """The manager knows no such job, VM or log."""

    def __init__(self, message: str) -> None:
        super().__init__(404, message)
