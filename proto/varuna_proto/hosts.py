"""Checks of network addresses that manager and agent share."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def is_loopback(host: str) -> bool:
    """Whether `host` is `localhost` or a loopback address (IPv6 without brackets)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def networks(text: str) -> tuple[Network, ...]:
    """Parses addresses and networks, separated by commas. Raises ValueError for anything else."""
    found = []
    for part in text.split(",") if text.strip() else ():
        try:
            found.append(ipaddress.ip_network(part.strip()))
        except ValueError:
            hint = "write it as 10.0.0.1 or 10.0.0.0/24"
            raise ValueError(f"{part.strip()!r} is neither an address nor a network: {hint}") from None
    return tuple(found)


def mapped(network: Network) -> Network | None:
    """An IPv4 network as an IPv6 socket sees it (`::ffff:10.0.0.0/120`); None for an IPv6 network."""
    if network.version == 6:
        return None
    return ipaddress.IPv6Network(f"::ffff:{network.network_address}/{network.prefixlen + 96}")


def is_in(address: str, among: Iterable[Network]) -> bool:
    """Whether one of the networks contains the address; an IPv4 address may be mapped to IPv6 (`::ffff:10.0.0.1`)."""
    host = ipaddress.ip_address(address)
    if isinstance(host, ipaddress.IPv6Address):
        host = host.ipv4_mapped or host
    return any(host in network for network in among)


def caller_of(address: str) -> str:
    """The unit that counts as one caller: an IPv4 address, or the /64 of an IPv6 address, which one machine owns."""
    if ":" not in address:
        return address
    host = ipaddress.IPv6Address(address)
    return str(host.ipv4_mapped or ipaddress.IPv6Network((int(host) >> 64 << 64, 64)))
