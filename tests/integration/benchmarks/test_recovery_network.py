"""VMs of the recovery benchmark in network namespaces: they reach the manager and each other, and nothing is left."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from repository import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from _recovery_network import VmNetwork

_ASK = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    connection.sendall(b"agent")
    print(connection.recv(100).decode())
"""


def list_names() -> tuple[set[str], set[str]]:
    def run(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return {line.split()[0] for line in run("ip", "netns", "list").splitlines()}, {
        link["ifname"] for link in json.loads(run("ip", "-j", "link"))
    }


@pytest.mark.needs("root")
def test_vms_reach_the_manager_and_each_other_and_nothing_is_left() -> None:
    with VmNetwork(2, 4000) as network:
        namespaces, links = list_names()
        own = [name for name in namespaces if name.startswith(network.name)]
        assert len(own) == 2
        flags = network.make_manager_flags()
        port = int(flags[flags.index("--grpc-port") + 1])
        with socket.create_server(("127.0.0.1", port)) as manager:
            asks = ["ip", "netns", "exec", own[0], sys.executable, "-c", _ASK, str(port)]
            with subprocess.Popen(asks, stdout=subprocess.PIPE, text=True) as agent:
                connection, _ = manager.accept()
                with connection:
                    assert connection.recv(100) == b"agent"
                    connection.sendall(b"manager")
                assert agent.communicate()[0] == "manager\n"
        assert network.measure_mbit(probe_bytes=1 << 20) > 0
    namespaces, links = list_names()
    assert not [name for name in (*namespaces, *links) if name.startswith(network.name)]
