"""Proofs over a gloo group: each member proves to each other that it knows the generation's secret.

gloo accepts the first connection to its ports that knows a small, easily guessed number. So before anything else goes
over a new group, each member sends a MAC to each other, over the connections that training will use. That costs nothing
afterwards. A MAC names the group, its sender and its receiver: it is of no use elsewhere.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from datetime import timedelta

import torch

from varuna.distributed.gloo import GlooGroup
from varuna.distributed.handshake import PROOF_BYTES, MeetingKey

__all__ = ["prove_peers"]

_TAG = 1 << 30
"""No message of training has this tag."""
_LIMIT = timedelta(seconds=60)
"""The limit for a proof, which a rank sends as soon as it is connected; a stranger may send none."""


def prove_peers(group: GlooGroup, key: MeetingKey, name: str, *, ranks: Sequence[int], own: int) -> None:
    """Exchanges proofs with all `ranks` of the group `name`; `own`: the index of this process in them.

    Raises RuntimeError naming a peer that cannot prove itself. Then nothing that came over the group may be used.
    """
    peers = [peer for peer in range(len(ranks)) if peer != own]
    received = {peer: torch.zeros(PROOF_BYTES, dtype=torch.uint8) for peer in peers}
    receives = {peer: group.recv([received[peer]], peer, _TAG) for peer in peers}
    proofs = [
        torch.frombuffer(bytearray(_proof(key, name, ranks[own], ranks[peer])), dtype=torch.uint8) for peer in peers
    ]
    sends = [group.send([proof], peer, _TAG) for peer, proof in zip(peers, proofs, strict=True)]
    for peer in peers:
        try:
            receives[peer].wait(_LIMIT)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {ranks[peer]} did not prove that it belongs to this generation: {error}"
            ) from error
        if not hmac.compare_digest(received[peer].numpy().tobytes(), _proof(key, name, ranks[peer], ranks[own])):
            raise RuntimeError(f"a stranger has taken the place of rank {ranks[peer]} in group {name}")
    for send in sends:
        send.wait(_LIMIT)


def _proof(key: MeetingKey, name: str, sender: int, receiver: int) -> bytes:
    return key.compute_mac("gloo", name.encode(), str(sender).encode(), str(receiver).encode())
