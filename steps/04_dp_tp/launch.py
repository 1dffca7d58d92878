"""What starts replicas: where each one runs, on which devices, and what they are together."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import msgspec

from shared.engine.slots import Limits

from .config import ParallelConfig
from .online import online
from .replica import build_engine

logger = logging.getLogger(__name__)

BUILD = f"{build_engine.__module__}:build_engine"
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Ranks of all replicas on CPUs, a process of some 300 MB each. GPUs are counted.
MAX_CPU_RANKS = 64


class Launcher:
    """Starts the replicas of a config, each on its own devices, as often as it is asked to."""

    def __init__(self, config: ParallelConfig, build: Any = None, in_process: bool = False) -> None:
        """`build` and `in_process` are those of EngineClient. Raises ValueError if there are not
        devices enough, or too many replicas for a CPU."""
        self.config = config
        self._build = build
        self._in_process = in_process
        self._devices: list[str] = []
        """A replica's, as CUDA_VISIBLE_DEVICES names them; none at all on cpu."""
        if config.distributed_backend == "process":
            if config.device != "cpu":
                self._devices = assign_devices(config, visible_devices(os.environ))
            if not self._devices and config.num_devices > MAX_CPU_RANKS:
                raise ValueError(f"{config.needs}, but at most {MAX_CPU_RANKS} ranks run on a CPU")

    def start(self, number: int) -> Any:
        """The EngineClient of a replica, which is not waited for."""
        config, client = self.config.of_replica(number), online("client")
        if self._in_process:
            return client.EngineClient(config, self._build or build_engine, in_process=True)
        return client.EngineClient(config, transport=self._transport(number))

    def start_all(self) -> list[Any]:
        """As `start`. Whatever is raised, none is left."""
        clients: list[Any] = []
        try:
            for number in range(self.config.data_parallel_size):
                clients.append(self.start(number))
        except BaseException:
            for client in clients:
                client.close(0)
            raise
        return clients

    def _transport(self, number: int) -> Any:
        """Where distributed_backend counts: how the engine is started, and spoken to."""
        build, name = self._build or BUILD, f"engine {number}"
        if self.config.distributed_backend == "ray":
            return ray_transport().RayTransport(build, name, self.config)
        environment = {VISIBLE: self._devices[number]} if self._devices else None
        return online("transport").ProcessTransport(build, name, environment)


def ray_transport() -> Any:
    """The module. Ray is an extra, and takes a while to import."""
    return import_module(".ray_transport", __package__)


def visible_devices(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them, in CUDA's order."""
    import torch  # here: it takes seconds, and on cpu nobody asks

    count = torch.cuda.device_count()  # by way of NVML: no CUDA context is made for it
    if VISIBLE not in environment:
        return [str(device) for device in range(count)]
    return [name.strip() for name in environment[VISIBLE].split(",")][:count]


def assign_devices(config: ParallelConfig, visible: Sequence[str]) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each replica; none if this is a machine without GPUs and the config
    can do without. Raises ValueError naming how many there are and how many it takes."""
    ids = config.device_ids or range(config.num_devices)
    if not visible and config.device == "auto" and not config.device_ids:
        return []
    if max(config.device_ids, default=config.num_devices - 1) >= len(visible):
        there = f"{len(visible)} GPUs can be seen"
        if config.device_ids:
            raise ValueError(f"device_ids={list(ids)} names GPU {max(ids)}, but {there}")
        raise ValueError(f"{config.needs}, but {there}")
    size = config.tensor_parallel_size
    return [
        ",".join(visible[device] for device in ids[first : first + size])
        for first in range(0, len(ids), size)
    ]


def combined(config: ParallelConfig, infos: Sequence[Any]) -> Any:
    """The EngineInfo of all replicas together. What one of them cannot hold is no request: whoever
    gets it must be able to run it."""
    first = infos[0]
    limits = Limits(
        *(min(getattr(info.limits, name) for info in infos) for name in Limits.__dataclass_fields__)
    )
    return msgspec.structs.replace(
        first,
        limits=limits,
        description={
            **first.description,
            "num_kvcache_blocks": limits.num_blocks,
            "tokens_in_pool": limits.num_blocks * limits.block_size,
            "max_model_length": limits.max_model_length,
            **{name: getattr(config, name) for name in REPORTED},
        },
    )


REPORTED = ("data_parallel_size", "routing", "distributed_backend")
"""Options that no replica knows of."""
