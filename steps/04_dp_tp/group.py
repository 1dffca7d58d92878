"""What rank 0 and the workers have in common: how they meet, and what the messages mean."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from shared.kernels.peer_all_reduce import PeerAllReduce
from shared.layers.tensor_parallel import TensorParallel

LOOPBACK = "127.0.0.1"
# The first word of a message.
STEP, MAKE, DROP = range(3)
# All ranks are of this machine. Told nothing, libraries look for the one that its name leads to.
INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
# Ranks read their weights at different speeds, and meet afterwards.
PATIENCE = timedelta(minutes=10)


class Make(msgspec.Struct):
    """Make a ModelRunner of these arguments."""

    config: dict[str, Any]
    model_config: dict[str, Any]
    directory: str | None
    decodes_in_front: bool

    def to_words(self) -> np.ndarray:
        text = msgspec.json.encode(self)
        return np.frombuffer(text + b" " * (-len(text) % 4), np.int32)

    @classmethod
    def from_words(cls, words: np.ndarray) -> Make:
        return msgspec.json.decode(words.tobytes(), type=cls)


def open_store() -> dist.TCPStore:
    """Where the ranks find each other: in rank 0, on a free port of this machine alone."""
    # A socket that the store opened for itself would listen on every interface, whatever host it is
    # told, and whoever wrote to it could speak for a rank.
    with socket.create_server((LOOPBACK, 0)) as listener:
        return dist.TCPStore(
            LOOPBACK,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=PATIENCE,
            master_listen_fd=os.dup(listener.fileno()),  # which closes it
        )


def join(
    rank: int, size: int, port: int, device_type: str, store: dist.Store | None = None
) -> TensorParallel:
    """Become a rank of the group of this process; returns when all have. On GPUs, rank r has the
    r-th of those that CUDA_VISIBLE_DEVICES shows."""
    if store is None:
        store = dist.TCPStore(LOOPBACK, port, timeout=PATIENCE)
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", INTERFACE)
    device = None
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=PATIENCE,
        device_id=device,
    )
    peers = None
    if device is not None:
        assert dist.group.WORLD is not None
        peers = PeerAllReduce.connect(dist.group.WORLD, device)
    return TensorParallel(rank, size, peers=peers)
