"""A worker without a model: it speaks the agent's protocol, counts steps, and starts in a tenth of a second.

As in training, no rank is a step ahead of the others, every rank reports every step to its agent, and only steps that
all have done are saved: rank 0 leads and saves every few steps, the others follow. They continue from the last save.
The loss of a step is a function of its number. The job ends at the step that the file `end` names. Its one argument is
the profile that it hands in when it is to calibrate.
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
    leave_modes: list[agent_pb2.StopMode.ValueType] = []

    def send(**body: object) -> None:
        agent.sendall(framing.frame(worker_pb2.WorkerMessage(**body)))

    def listen() -> None:
        while (message := framing.receive(agent, worker_pb2.AgentToWorker)) is not None:
            if message.HasField("leave"):  # and not the generation's secret
                leave_modes.append(message.leave.mode)
        os._exit(1)  # the agent is gone

    send(
        hello=worker_pb2.WorkerHello(
            job_id=environment.job_id, generation=environment.generation, rank=environment.rank, pid=os.getpid()
        )
    )
    threading.Thread(target=listen, daemon=True).start()
    step = _read("saved")
    send(ready=worker_pb2.WorkerReady(resumed_step=step))
    if environment.mode is Mode.CALIBRATE:
        if environment.rank == 0:
            send(profile_done=worker_pb2.ProfileDone(profile_json=Path(sys.argv[1]).read_text()))
        return

    others = [rank for rank in range(environment.world_size) if rank != 0]

    done = f"done.{environment.generation}"
    _write(f"{done}.{environment.rank}", step)

    def done_by_all() -> int:
        return min([step, *(_read(f"{done}.{rank}") for rank in others)])

    def do_step() -> None:
        nonlocal step
        step += 1
        step_us = int(STEP_S * 1e6)
        send(step_done=worker_pb2.StepDone(step=step, loss=loss_of(step), step_us=step_us, examples=8, forward_us=10))
        _write(f"{done}.{environment.rank}", step)

    def save() -> None:
        newest = done_by_all()
        if newest > _read("saved"):
            _write("saved", newest)
            url = Path("saved").absolute().as_uri()
            send(checkpoint_done=worker_pb2.CheckpointDone(step=newest, url=url, total_bytes=1))

    while not Path("over").exists():
        if leave_modes:
            if environment.rank == 0 and leave_modes[-1] != agent_pb2.STOP_MODE_LEAVE_NOW:
                save()  # it holds no state
            agent.close()
            os._exit(EXIT_GENERATION_ENDED)
        time.sleep(STEP_S)
        if environment.rank != 0:
            while step < _read(f"{done}.0"):
                do_step()
        elif done_by_all() == step:
            if step % SAVE_EVERY == 0:
                save()
            if Path("end").exists() and step >= _read("end"):
                Path("over").touch()
            else:
                do_step()


def _read(name: str) -> int:
    file = Path(name)
    return int(file.read_text()) if file.exists() else 0


def _write(name: str, number: int) -> None:
    part = Path(f"{name}.{os.getpid()}.part")
    part.write_text(str(number))
    part.rename(name)


if __name__ == "__main__":
    main()
