"""The gRPC server's side of mutual TLS."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from varuna_manager.access.authority import KeyPair


def make_server_credentials(ca_pem: bytes, current: Callable[[], KeyPair]) -> grpc.ServerCredentials:
    """Credentials that present the `current` certificate at each handshake, and accept only clients of the authority.

    gRPC calls `current` in its own threads. Open streams go on when the certificate changes.
    """
    shown: list[KeyPair] = []

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        pair = current()
        if shown == [pair]:
            return None  # unchanged
        shown[:] = [pair]
        return grpc.ssl_server_certificate_configuration([(pair.key_pem, pair.certificate_pem)], ca_pem)

    first = fetch()
    assert first is not None, "there was no certificate before"
    # The stubs do not allow None, which means "unchanged".
    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=True)  # type: ignore[arg-type]
