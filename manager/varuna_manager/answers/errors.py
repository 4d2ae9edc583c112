"""Errors that a caller of the API can cause. The message names the thing, the value and the way out."""

from __future__ import annotations


class ServiceError(Exception):
    """A request that cannot be met; `str()` is one line for the caller."""


class MissingError(ServiceError):
    """The thing does not exist."""


class ConflictError(ServiceError):
    """The present state does not allow it."""


class ChangedError(ServiceError):
    """The thing has changed since the caller read it."""


class UnavailableError(ServiceError):
    """It cannot be done now, but perhaps later."""


class InvalidError(ServiceError):
    """The request is malformed or contradicts itself."""


class UnauthenticatedError(ServiceError):
    """The caller has no valid token or certificate. The message never repeats it."""


class ForbiddenError(ServiceError):
    """The caller is known and lacks the right."""
