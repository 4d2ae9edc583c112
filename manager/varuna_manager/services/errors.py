"""What the API's callers can get wrong. The text names the thing, the value and the way out."""

from __future__ import annotations


class ServiceError(Exception):
    """A request that cannot be met; `str()` is one line for the person who made it."""


class NotFoundError(ServiceError):
    """There is no such thing."""


class ConflictError(ServiceError):
    """It cannot be done as things are."""


class ChangedError(ServiceError):
    """It is not any more as the caller has seen it."""


class UnavailableError(ServiceError):
    """It cannot be done now; later it may."""


class InvalidError(ServiceError):
    """What was sent makes no sense."""


class UnauthenticatedError(ServiceError):
    """Whoever it is has not said so credibly. Never repeats what was sent."""


class ForbiddenError(ServiceError):
    """It is known who asks, and that it is not for them."""
