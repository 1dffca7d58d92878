"""A worker rank: runs its part of the model on what rank 0 has packed, and knows nothing else.

python -m steps.04_dp_tp.worker RANK SIZE PORT DEVICE CHANNEL MEMORY    (started by worker_group.py)
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
import torch.distributed as dist

from shared.config import EngineConfig
from shared.engine.model_runner import ModelRunner
from shared.engine.step_plan import StepPlan
from shared.layers.tensor_parallel import TensorParallel
from shared.models.config import ModelConfig

from .channel import Receiver
from .group import DROP, MAKE, STEP, Make, join
from .online import online

# How long a worker looks for its next step without sleeping. On a GPU: longer than most steps take,
# so that waking up never delays one. On the CPU the ranks need the processors themselves.
SPIN_SECONDS = {"cuda": 0.02, "cpu": 0.0}
EXIT_FAILED = 1


class Worker:
    """The life of a worker: it makes a runner, follows rank 0 through its steps, drops it, and
    perhaps makes another."""

    def __init__(self, tp: TensorParallel, receiver: Receiver, sock: socket.socket) -> None:
        self._tp = tp
        self._receiver = receiver
        self._socket = sock
        self._runner: ModelRunner | None = None

    def run(self) -> None:
        """Until rank 0 has closed the channel."""
        self.say_ready()
        while (message := self._receiver.receive()) is not None:
            header, words = message
            kind = int(header[0])
            if kind == STEP:
                assert self._runner is not None
                self._runner.follow(StepPlan.from_words(header[1:]), words)
            elif kind == MAKE:
                self._make(Make.from_words(header[1:]))
            else:
                assert kind == DROP
                self._drop()
        self._drop()

    def say_ready(self) -> None:
        self._socket.sendall(b"+")

    def _make(self, make: Make) -> None:
        self._drop()
        self._runner = ModelRunner(
            EngineConfig(**make.config),
            msgspec.convert(make.model_config, ModelConfig),
            None if make.directory is None else Path(make.directory),
            make.decodes_in_front,
            self._tp,
        )
        self.say_ready()

    def _drop(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None


def main() -> int:
    rank, size, port = (int(argument) for argument in sys.argv[1:4])
    device_type, channel, memory = sys.argv[4], int(sys.argv[5]), int(sys.argv[6])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the front end, which ends rank 0
    process = online("engine_process")
    lifeline = process.take_lifeline()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format=f"%(asctime)s %(levelname)s [rank {rank}] %(message)s",
    )
    try:
        with socket.socket(fileno=channel) as sock:
            receiver = Receiver(sock, memory, SPIN_SECONDS[device_type])
            sock.sendall(b"+")
            tp = join(rank, size, port, device_type)
            Worker(tp, receiver, sock).run()
            dist.destroy_process_group()
    except Exception as error:
        # Nothing can be tidied up: the others are in the middle of something.
        process.LastWords(lifeline).say(error)
        os._exit(EXIT_FAILED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
