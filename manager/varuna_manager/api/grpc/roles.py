"""How managers that do not lead, or no longer lead, answer agents: dial the next manager."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio

from varuna_manager.db.engine import NotLeaderError, StoreAwayError
from varuna_manager.world.leadership import Standing, Term

LEADER_METADATA = "varuna-leader"
"""Trailing metadata of a refusal: host:port of the leader's gRPC service, if it is known."""

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


# Both are generic for the type checker only.
class StandbyHandler(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Refuses every call, with FAILED_PRECONDITION and the leader's address."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> _Handler:
        async def refuse(requests: AsyncIterator[bytes], context: _Context) -> None:
            leader = self._standing.leader
            metadata = ((LEADER_METADATA, leader.grpc_address),) if leader is not None else ()
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._standing.describe_leader(), metadata)

        return grpc.stream_stream_rpc_method_handler(cast(Any, refuse))


class LeaderInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Ends a leader's streams when its lease is over, so that it neither handles nor acknowledges later messages.

    An acknowledged heartbeat would renew the agent's lease, but the next leader relies on the end of that lease.
    """

    def __init__(self, term: Term) -> None:
        self._term = term

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        handler = await continuation(handler_call_details)
        found = cast(Any, handler)  # the stubs type it for a server without asyncio; None: no such method
        if found is None:
            return handler
        codecs = (found.request_deserializer, found.response_serializer)
        if found.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(self._stream(found.stream_stream), *codecs)
        if found.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._unary(found.unary_unary), *codecs)
        return handler

    def _stream(self, serve: Callable[[AsyncIterator[Any], _Context], AsyncIterator[Any]]) -> Any:
        async def guarded(requests: AsyncIterator[Any], context: _Context) -> AsyncIterator[Any]:
            try:
                async for message in serve(self._while_held(requests), context):
                    yield message
            except (NotLeaderError, StoreAwayError) as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

        return guarded

    def _unary(self, serve: Callable[[Any, _Context], Awaitable[Any]]) -> Any:
        async def guarded(request: Any, context: _Context) -> Any:
            try:
                return await serve(request, context)
            except (NotLeaderError, StoreAwayError) as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

        return guarded

    async def _while_held(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            if not self._term.is_held():
                return
            yield request
