"""The death of a manager that runs within a test's process."""


class ManagerDiedError(BaseException):
    """Not an Exception, so that no handler in the manager catches it."""
