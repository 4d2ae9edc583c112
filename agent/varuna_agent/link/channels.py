"""Opens gRPC channels to the manager: for the stream, for archives and for renewing the certificate."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # otherwise a new channel shares the backoff of the one before
    ("grpc.enable_http_proxy", 0),  # the manager is on this machine or in our own network
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


def open_channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    """`credentials`: None for a manager without TLS."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=_OPTIONS)


def raise_if_cancelled() -> None:
    """Raise asyncio.CancelledError in a task that is being cancelled.

    To be called when a call has failed: grpc.aio swallows a cancellation while it connects, and the task would go on.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
