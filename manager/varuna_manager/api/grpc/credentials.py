"""The gRPC server's side of mutual TLS."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from varuna_manager.services.authority import KeyPair


def server_credentials(ca_pem: bytes, current: Callable[[], KeyPair]) -> grpc.ServerCredentials:
    """Credentials that present the `current` certificate at each handshake, and take clients of the authority only.

    `current` is called in gRPC's threads. Streams that are open go on when the certificate changes.
    """
    shown: list[KeyPair] = []

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        pair = current()
        if shown == [pair]:
            return None  # as before
        shown[:] = [pair]
        return grpc.ssl_server_certificate_configuration([(pair.key_pem, pair.certificate_pem)], ca_pem)

    first = fetch()
    assert first is not None, "nothing was shown before"
    # The stubs do not know that None means "as before".
    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=True)  # type: ignore[arg-type]
