"""The physical floor of a load, where the engine is ours and the shape of its model is known."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.floor import Limits, ModelCost, Rates, measure_rates, num_devices, physical_floor
from bench.online.plan import Plan
from bench.result import Floor
from bench.workloads import Request
from shared.models.config import (
    ModelConfig,
    load_model_config,
    real_model_config,
    real_model_names,
)
from shared.models.files import BUNDLED, ModelFiles

logger = logging.getLogger(__name__)

NEEDED = {
    *("model", "dtype", "device", "max_num_sequences", "max_num_batched_tokens"),
    *("tokens_in_pool", "max_model_length", "enable_prefix_caching"),
}


@dataclass(frozen=True)
class Device:
    """What an engine runs on, and what a step of it costs."""

    settings: Mapping[str, Any]
    """As the engine describes itself."""
    cost: ModelCost
    rates: Rates

    @classmethod
    def measure(cls, settings: Mapping[str, Any]) -> Device | None:
        """Takes a second on the engine's device, which should be idle. None: the model's shape is
        not known, or the device has no room to measure it."""
        shape = known_shape(settings)
        if shape is None:
            return None
        dtype: torch.dtype = getattr(torch, settings["dtype"])
        cost = ModelCost.of(shape, dtype.itemsize)
        try:
            rates = measure_rates(settings["device"].partition(":")[0], dtype, cost.weight_bytes)
        except RuntimeError as error:
            logger.warning("no floor: the device cannot be measured: %s", error)
            return None
        return cls(settings, cost, rates)

    def floor(self, plan: Plan, concurrency: int | None) -> Floor:
        limits = Limits.of(self.settings, concurrency)
        devices = num_devices(self.settings)
        return physical_floor(_Work(plan), self.cost, self.rates, limits, devices)


class _Work:
    """A plan as the floor reads it."""

    window = None

    def __init__(self, plan: Plan) -> None:
        self.requests = [
            Request(tuple(job.prompt), job.max_tokens, job.temperature, job.arrival)
            for job in plan.jobs
        ]


def known_shape(settings: Mapping[str, Any]) -> ModelConfig | None:
    """From what an engine of ours says of itself; nothing is fetched."""
    if not settings.keys() >= NEEDED:
        return None
    model = str(settings["model"])
    name = model.rpartition("/")[2].lower()
    if model == BUNDLED:
        return ModelFiles.find(None, "auto").config
    if Path(model).is_dir():
        return load_model_config(Path(model))
    return real_model_config(name) if name in real_model_names() else None
