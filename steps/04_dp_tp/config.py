"""What stage 03 can be told, and how many engines there are, where, and which of them gets what."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from steps import load

from .online import STAGE


class ParallelOptions(pydantic.BaseModel):
    """What this stage adds. `tensor_parallel_size` and `data_parallel_size` are in every Config."""

    model_config = pydantic.ConfigDict(use_attribute_docstrings=True)

    device_ids: tuple[Annotated[int, pydantic.Field(ge=0)], ...] = ()
    """GPUs to use, of those that CUDA_VISIBLE_DEVICES shows: first those of the first replica, then
    those of the second... None given: the first ones."""
    routing: Literal["prefix", "least_tokens", "round_robin"] = "prefix"
    """Which replica gets a request. least_tokens: the one with the least work left. prefix: the one
    that has computed most of its prompt before, unless another has much less work left."""
    distributed_backend: Literal["process", "ray"] = "process"
    """Where replicas run. process: on this machine. ray: anywhere in a Ray cluster."""

    @pydantic.field_validator("device_ids", mode="before")
    @classmethod
    def _device_ids_as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value


Online: Any = load(STAGE).Config


class ParallelConfig(ParallelOptions, Online):
    """An engine by its stage's name, its options, and how it is spread over GPUs. An option that
    only other engines have is refused."""

    own_fields: ClassVar[frozenset[str]] = Online.own_fields | ParallelOptions.model_fields.keys()

    @pydantic.model_validator(mode="after")
    def _check_devices(self) -> ParallelConfig:
        ids = self.device_ids
        if not ids:
            return self
        if self.device == "cpu" or self.distributed_backend == "ray":
            place = "cpu" if self.device == "cpu" else "ray"
            raise ValueError(f"device_ids={list(ids)} are GPUs of this machine, not for {place}")
        if len(set(ids)) < len(ids):
            raise ValueError(f"device_ids={list(ids)} names a GPU twice")
        if len(ids) != self.num_devices:
            raise ValueError(f"device_ids={list(ids)} are {len(ids)} GPUs, but {self.needs}")
        return self

    @property
    def num_devices(self) -> int:
        return int(self.data_parallel_size * self.tensor_parallel_size)

    @property
    def needs(self) -> str:
        """In words, for errors."""
        return (
            f"data_parallel_size={self.data_parallel_size} times "
            f"tensor_parallel_size={self.tensor_parallel_size} makes {self.num_devices}"
        )

    def of_replica(self, number: int) -> ParallelConfig:
        """What one replica is told: nothing of the others. Traces are a file each."""
        given = self.model_dump(include=self.model_fields_set)
        for name in ("data_parallel_size", *ParallelOptions.model_fields):
            given.pop(name, None)
        if self.trace is not None and self.data_parallel_size > 1:
            path = PurePath(self.trace)
            given["trace"] = str(path.with_name(f"{path.stem}.{number}{path.suffix}"))
        return type(self)(**given)


Config = ParallelConfig
