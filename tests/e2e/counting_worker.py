"""A worker without a model: it speaks the agent's protocol, counts steps, and starts in a tenth of a second.

Rank 0 makes the steps, saves the newest in a file every few, and goes on from there; the other ranks only are there.
The loss of a step is a function of its number. It ends when the file `end` says at which step. Its one argument is the
profile that it hands in when it is to calibrate.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

from varuna_proto import framing
from varuna_proto.environment import EXIT_GENERATION_ENDED, Mode, WorkerEnvironment
from varuna_proto.v1 import agent_pb2, worker_pb2

SAVE_EVERY = 4
STEP_S = 0.02


def loss_of(step: int) -> float:
    return 1.0 / (1 + step)


def main() -> None:
    environment = WorkerEnvironment.from_environ(os.environ)
    assert environment is not None
    agent = socket.socket(socket.AF_UNIX)
    agent.connect(environment.agent_socket)
    told: list[agent_pb2.StopMode.ValueType] = []

    def say(**body: object) -> None:
        agent.sendall(framing.frame(worker_pb2.WorkerMessage(**body)))

    def listen() -> None:
        while (message := framing.receive(agent, worker_pb2.AgentToWorker)) is not None:
            told.append(message.leave.mode)
        os._exit(1)  # the agent is gone

    say(
        hello=worker_pb2.WorkerHello(
            job_id=environment.job_id, generation=environment.generation, rank=environment.rank, pid=os.getpid()
        )
    )
    threading.Thread(target=listen, daemon=True).start()
    saved = Path("saved")
    step = int(saved.read_text()) if saved.exists() else 0
    say(ready=worker_pb2.WorkerReady(resumed_step=step))
    if environment.mode is Mode.CALIBRATE:
        if environment.rank == 0:
            say(profile_done=worker_pb2.ProfileDone(profile_json=Path(sys.argv[1]).read_text()))
        return

    def save() -> None:
        part = Path(f"saved.{environment.generation}.part")
        part.write_text(str(step))
        part.rename(saved)
        say(checkpoint_done=worker_pb2.CheckpointDone(step=step, url=saved.absolute().as_uri(), total_bytes=1))

    end, over = Path("end"), Path("over")
    while not over.exists():
        if told:
            if environment.rank == 0 and told[-1] == agent_pb2.STOP_MODE_SAVE_FIRST:
                save()
            agent.close()
            os._exit(EXIT_GENERATION_ENDED)
        time.sleep(STEP_S)
        if environment.rank != 0:
            continue
        step += 1
        done = worker_pb2.StepDone(step=step, loss=loss_of(step), step_us=int(STEP_S * 1e6), examples=8, forward_us=10)
        say(step_done=done)
        if step % SAVE_EVERY == 0:
            save()
        if end.exists() and step >= int(end.read_text()):
            over.touch()


if __name__ == "__main__":
    main()
