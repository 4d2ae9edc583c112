"""The cost of the proofs by which ranks show each other that they belong to one generation.

Two processes connect a gloo group in turns: bare, through torch's TCPStore, as anybody could; and through Varuna's
rendezvous, whose store takes only who knows the secret, and where each rank proves itself over the new connection. The
report has medians over the turns: of the time to connect, of a small message's one-way time, and of a large message's
bandwidth (the best of each turn, since other programs run beside), with the ratio of the pairs of turns. For
comparison, one stream of bytes over a plain socket and over TLS 1.3, which is what encryption would cost (torch's gloo
is built without it).

    python benchmarks/wire_security.py --json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from _pipeline_network import find_free_port
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from torch.distributed import PrefixStore, TCPStore

from varuna.distributed.departure import Departure
from varuna.distributed.gloo import GlooGroup, connect_group
from varuna.distributed.rendezvous import Rendezvous
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.plan import Plan

HOST = "127.0.0.1"
LIMIT = timedelta(seconds=60)
ROUND_TRIPS = 200
MESSAGES = 16
MESSAGE_BYTES = 4 * 1024 * 1024
STREAM_BYTES = 512 * 1024 * 1024
FIGURES = {"connect_ms": 1.0, "latency_us": 1.0, "gb_per_s": -1.0}
"""And whether more is worse."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each kind")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rounds = measure_groups(given.rounds)
    report: dict[str, Any] = {"rounds": given.rounds, "torch": torch.__version__, "cores": os.cpu_count()}
    for figure in FIGURES:
        bare, proved = ([one[kind][figure] for one in rounds] for kind in ("bare", "proved"))
        ratios = [b / a for a, b in zip(bare, proved, strict=True)]
        report[figure] = {
            "bare": statistics.median(bare),
            "proved": statistics.median(proved),
            "ratio": statistics.median(ratios),
            "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
        }
    report["tls"] = measure_tls(3)
    if given.json:
        print(json.dumps(report, indent=2))
        return
    print(f"{'':12} {'bare':>10} {'proved':>10} {'ratio':>8}   quartiles")
    for figure in FIGURES:
        row = report[figure]
        low, high = row["ratio_quartiles"]
        print(f"{figure:12} {row['bare']:10.3f} {row['proved']:10.3f} {row['ratio']:8.3f}   {low:.3f} to {high:.3f}")
    tls = report["tls"]
    print(f"one stream: plain {tls['plain_gb_per_s']:.2f} GB/s, TLS 1.3 {tls['tls_gb_per_s']:.2f} GB/s")


def measure_groups(rounds: int) -> list[dict[str, dict[str, float]]]:
    """Of rank 0, in each round, by kind."""
    held = socket.socket()
    held.bind((HOST, 0))
    port = held.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    (Path(folder) / f"{rank}").write_text(json.dumps(_be_rank(rank, rounds, port)))
                    status = 0
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            children.append(child)
        for child in children:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        measured: list[dict[str, dict[str, float]]] = json.loads((Path(folder) / "0").read_text())
    return measured


def _be_rank(rank: int, rounds: int, port: int) -> list[dict[str, dict[str, float]]]:
    environment = WorkerEnvironment(
        **{
            **vars(WorkerEnvironment.alone("bench", micro_batch=1, global_batch=2)),
            "world_size": 2,
            "plan": Plan(p=1, d=2, micro_batch=1, global_batch=2),
            "rank": rank,
            "rendezvous_port": port,
            "secret": "5" * 64,
        }
    )
    rendezvous = Rendezvous(environment, Departure())
    ports = [json.loads(text) for text in rendezvous.exchange_values("port", (0, 1), json.dumps(find_free_port()))]
    bare = TCPStore(HOST, ports[0], 2, rank == 0, LIMIT, wait_for_workers=False)
    measured = []
    for number in range(rounds):
        kinds: dict[str, Callable[[], GlooGroup]] = {
            "bare": lambda name=f"{number}": connect_group(  # type: ignore[misc]
                PrefixStore(name, bare), rank, 2, address=HOST, timeout=LIMIT
            ),
            "proved": lambda name=f"{number}": rendezvous.connect_gloo(name, (0, 1)),  # type: ignore[misc]
        }
        # In turns, and each kind first as often as the other.
        order = sorted(kinds, reverse=bool(number % 2))
        figures = {}
        for kind in order:
            rendezvous.exchange_values(f"ready/{number}/{kind}", (0, 1), "")
            figures[kind] = _measure(kinds[kind], 1 - rank)
        measured.append(figures)
    rendezvous.exchange_values("over", (0, 1), "")
    return measured


def _measure(connect: Callable[[], GlooGroup], peer: int) -> dict[str, float]:
    began_s = time.perf_counter()
    group = connect()
    connect_s = time.perf_counter() - began_s
    small, large = torch.zeros(8, dtype=torch.uint8), torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    taken_s = []
    for _ in range(ROUND_TRIPS):
        began_s = time.perf_counter()
        _ping(group, small, small, peer)
        taken_s.append((time.perf_counter() - began_s) / 2)
    large_s = []
    for _ in range(MESSAGES):
        began_s = time.perf_counter()
        _ping(group, large, small, peer)
        large_s.append(time.perf_counter() - began_s)
    return {
        "connect_ms": 1e3 * connect_s,
        "latency_us": 1e6 * min(taken_s),
        "gb_per_s": MESSAGE_BYTES / min(large_s) / 1e9,
    }


def _ping(group: GlooGroup, there: torch.Tensor, back: torch.Tensor, peer: int) -> None:
    if peer == 1:
        group.send([there], peer, 0).wait(LIMIT)
        group.recv([back], peer, 0).wait(LIMIT)
    else:
        group.recv([there], peer, 0).wait(LIMIT)
        group.send([back], peer, 0).wait(LIMIT)


def measure_tls(repeats: int) -> dict[str, float]:
    """GB/s of one stream between two processes, the best of some."""
    with tempfile.TemporaryDirectory() as folder:
        server, client = _tls_contexts(Path(folder))
        plain = max(_stream_gb_per_s(None, None) for _ in range(repeats))
        tls = max(_stream_gb_per_s(server, client) for _ in range(repeats))
    return {"plain_gb_per_s": plain, "tls_gb_per_s": tls}


def _stream_gb_per_s(server: ssl.SSLContext | None, client: ssl.SSLContext | None) -> float:
    piece = bytes(1024 * 1024)
    with socket.create_server((HOST, 0)) as listener:
        child = os.fork()
        if child == 0:
            try:
                connection = socket.create_connection(listener.getsockname())
                connection = client.wrap_socket(connection) if client else connection
                for _ in range(STREAM_BYTES // len(piece)):
                    connection.sendall(piece)
                connection.recv(1)
            finally:
                os._exit(0)
        connection, _ = listener.accept()
        connection = server.wrap_socket(connection, server_side=True) if server else connection
        buffer, received = bytearray(len(piece)), 0
        began_s = time.perf_counter()
        with connection:
            while received < STREAM_BYTES:
                received += connection.recv_into(buffer)
            taken_s = time.perf_counter() - began_s
            connection.sendall(b"!")
        os.waitpid(child, 0)
    return STREAM_BYTES / taken_s / 1e9


def _tls_contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bench")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key(), serial_number=1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .sign(key, hashes.SHA256())
    )
    pem = folder / "bench.pem"
    pem.write_bytes(
        certificate.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pem)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(pem)
    return server, client


if __name__ == "__main__":
    main()
