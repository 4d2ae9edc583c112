"""Simulated agents for the control plane's benchmark; run as a process of their own by `_control_plane_world`.

Each has its own connection to the manager (`_control_plane_http2`), redials with the real agent's jittered backoff,
gives up a silent stream as that does, and sends the messages of a real one with one worker: Hello with the running
worker, heartbeats with its step and times and, if it is rank 0, reports of its generation's steps. Only the VM and the
worker are missing.

With `--pki` each dials over mutual TLS, with a certificate of its own. Commands come as lines on stdin ("connected",
"reset", "report", "end"); the answer to each but the last is a line of JSON on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import ssl
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from _control_plane_http2 import GrpcStream
from _control_plane_store import ENROLMENT, RANKS_PER_JOB, job_id, vm_id
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from varuna_agent.link.backoff import Backoff
from varuna_agent.state import Timings
from varuna_agent.state.conversation import Conversation
from varuna_manager.access.authority import AgentSubject, open_authority
from varuna_proto.v1 import agent_pb2 as pb

_PATH = "/varuna.v1.AgentService/Connect"


class Tally:
    """What the agents of this process have seen, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self.handled_s: list[float] = []
        """Of heartbeats: from handing them to the stream to their acknowledgement."""
        self.welcomed_s: list[float] = []
        """Of streams: from Hello to Welcome."""
        self.dials = 0
        self.connected: set[int] = set()
        self.lost: list[str] = []
        """Why streams ended."""
        self.away_s: list[float] = []
        """Of streams that were opened again: since the one before had ended."""

    def reset(self) -> None:
        self.handled_s, self.welcomed_s, self.away_s, self.lost, self.dials = [], [], [], [], 0


class SimulatedAgent:
    """One VM's agent, with one worker of a training generation that goes on for ever."""

    def __init__(
        self,
        number: int,
        address: str,
        *,
        with_worker: bool,
        tally: Tally,
        chance: random.Random,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._number = number
        self._tally = tally
        self._chance = chance
        self._address = address
        self._tls = tls
        self._backoff = Backoff(0.1, 5.0, chance)
        self._conversation = Conversation(silence_s=Timings().silence_s)
        """Only for when to give up a stream."""
        self._silence: asyncio.TimerHandle | None = None
        self._stream: GrpcStream | None = None
        self._ended = asyncio.Event()
        self._ended_at = 0.0
        self._with_worker = with_worker
        self._rank = number % RANKS_PER_JOB
        self._sequence = self._step = self._report = 0
        self._sent_at: dict[int, float] = {}
        self._interval_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._hello_at = 0.0

    async def run(self, after_s: float) -> None:
        """Dial, and again whenever the stream ends, without end."""
        await asyncio.sleep(after_s)
        while True:
            try:
                await self._dial()
            except (OSError, TimeoutError) as error:
                self._tally.lost.append(f"no connection: {type(error).__name__}")
            else:
                await self._ended.wait()
            await asyncio.sleep(self._backoff.next_s())

    async def _dial(self) -> None:
        self._ended.clear()
        self._tally.dials += 1
        host, _, port = self._address.rpartition(":")
        scheme = "http" if self._tls is None else "https"
        self._stream = stream = GrpcStream(_PATH, self._address, scheme, self)
        self._conversation.open_stream(time.monotonic())
        try:
            async with asyncio.timeout(self._conversation.silence_s):
                await asyncio.get_running_loop().create_connection(lambda: stream, host, int(port), ssl=self._tls)
        except TimeoutError:
            self._conversation.give_up_stream()
            raise

    def _look_for_silence(self) -> None:
        """Give up the stream if it is silent; else look again when it will be if nothing comes."""
        now = time.monotonic()
        if not self._conversation.is_silent(now):
            left_s = self._conversation.silent_at - now
            self._silence = asyncio.get_running_loop().call_later(left_s, self._look_for_silence)
        elif self._stream is not None:
            self._conversation.give_up_stream()
            self._stream.hang_up("it was silent")

    # ------------------------------------------------------------ called by the stream

    def opened(self) -> None:
        self._sent_at.clear()
        self._hello_at = time.monotonic()
        self._look_for_silence()
        hello = pb.Hello(
            vm_id=vm_id(self._number),
            incarnation=f"simulated-{self._number}",
            agent_version="benchmark",
            host="127.0.0.1",
            gpus=1,
            device_memory_bytes=2**34,
            rendezvous_port=20_000 + self._number % 40_000,
        )
        if self._with_worker:
            hello.workers.add(job_id=self._job, generation=1, rank=self._rank, step=self._step)
            hello.seen_generations.add(job_id=self._job, generation=1)
        self._send(pb.AgentMessage(hello=hello))

    def _send(self, message: pb.AgentMessage) -> None:
        assert self._stream is not None
        self._stream.send(message.SerializeToString())

    def received(self, data: bytes) -> None:
        now, message = time.monotonic(), pb.ManagerMessage.FromString(data)
        self._conversation.record_message(now)
        match message.WhichOneof("body"):
            case "welcome":
                self._tally.welcomed_s.append(now - self._hello_at)
                self._tally.connected.add(self._number)
                self._backoff.reset_wait()
                if self._ended_at:
                    self._tally.away_s.append(now - self._ended_at)
                self._interval_s = message.welcome.heartbeat_interval_s
                self._conversation.accept_welcome(message.welcome, now)
                self._beat_after(self._interval_s * self._chance.random())
            case "ack":
                sent_at = self._sent_at.pop(message.ack.heartbeat_sequence, None)
                if sent_at is not None:
                    self._tally.handled_s.append(now - sent_at)
            case "refused":
                self._tally.lost.append(f"refused: {message.refused.reason}")
            case "stop" | "launch" | "drain" as unwanted:
                self._tally.lost.append(f"commanded to {unwanted}: {message}")

    def closed(self, reason: str) -> None:
        self._tally.connected.discard(self._number)
        self._tally.lost.append(reason)
        self._conversation.close_stream()
        if self._silence is not None:
            self._silence.cancel()
        if self._timer is not None:  # it had been welcomed
            self._timer.cancel()
            self._timer, self._ended_at = None, time.monotonic()
        self._ended.set()

    # ------------------------------------------------------------ what it sends

    @property
    def _job(self) -> str:
        return job_id(self._number // RANKS_PER_JOB)

    def _beat_after(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._beat)

    def _beat(self) -> None:
        self._beat_after(self._interval_s)
        self._sequence += 1
        self._step += 1
        heartbeat = pb.Heartbeat(sequence=self._sequence, rendezvous_port=20_000 + self._number % 40_000)
        if self._with_worker:
            heartbeat.workers.add(
                job_id=self._job,
                generation=1,
                rank=self._rank,
                step=self._step,
                forward_us=self._chance.randint(9_900, 10_100),
                backward_us=self._chance.randint(19_900, 20_100),
                memory_bytes=2**33,
                wait_us=1_000,
            )
        self._sent_at[self._sequence] = time.monotonic()
        self._send(pb.AgentMessage(heartbeat=heartbeat))
        if self._with_worker and self._rank == 0:
            self._report_step()

    def _report_step(self) -> None:
        self._report += 1
        result = pb.StepResult(step=self._step, loss=1.0 / self._step, step_us=1_000_000, examples=8192)
        done = pb.StepsCompleted(job_id=self._job, generation=1, steps=[result])
        self._send(pb.AgentMessage(report=pb.Report(number=self._report, steps_completed=done)))


async def _serve(given: argparse.Namespace) -> None:
    """Run the agents, and answer the commands until "end"."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        agents = [
            SimulatedAgent(
                number,
                given.address,
                with_worker=number < given.working,
                tally=tally,
                chance=random.Random(number),
                tls=tls,
            )
            for number, tls in _contexts(given.pki, range(given.first, given.first + given.count), Path(folder))
        ]
    tasks = [asyncio.create_task(agent.run(given.spread_s * i / len(agents))) for i, agent in enumerate(agents)]
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().split():
        match line:
            case ["connected"]:
                await _answer({"connected": len(tally.connected), "cpu_s": time.process_time()})
            case ["reset"]:
                tally.reset()
                await _answer({})
            case ["report"]:
                await _answer(
                    {
                        "handled_s": tally.handled_s,
                        "welcomed_s": tally.welcomed_s,
                        "lost": tally.lost,
                        "dials": tally.dials,
                        "connected": len(tally.connected),
                        "away_s": tally.away_s,
                    }
                )
            case _:
                break
    for task in tasks:
        task.cancel()


def _contexts(pki: Path | None, numbers: range, folder: Path) -> Iterator[tuple[int, ssl.SSLContext | None]]:
    """With each agent's number; one key does for all. `folder`: for what a context reads, which is not needed later."""
    if pki is None:
        yield from dict.fromkeys(numbers).items()
        return
    authority, key = open_authority(pki), ec.generate_private_key(ec.SECP256R1())
    formats = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key_path, path = folder / "key.pem", folder / "certificate.pem"
    key_path.touch(mode=0o600)
    key_path.write_bytes(key.private_bytes(*formats))
    for number in numbers:
        subject = AgentSubject(vm_id(number), ENROLMENT)
        path.write_bytes(authority.sign_agent_certificate(key.public_key(), subject, timedelta(days=1)))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_cert_chain(path, key_path)
        context.load_verify_locations(cadata=authority.ca_pem.decode())
        context.set_alpn_protocols(["h2"])
        yield number, context


async def _answer(document: dict[str, object]) -> None:
    print(json.dumps(document), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--address", required=True)
    parser.add_argument("--first", type=int, required=True, help="number of the first of these agents")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--working", type=int, required=True, help="agents with a worker: those of lower numbers")
    parser.add_argument("--spread-s", type=float, required=True, help="over which they dial at first")
    parser.add_argument("--pki", type=Path, help="folder of the manager's authority; default: without TLS")
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
