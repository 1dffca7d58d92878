"""Everything the stages have in common: configuration, model, kernels and the engine's parts."""

from shared.config import EngineConfig
from shared.sampling_params import SamplingParams

__all__ = ["EngineConfig", "SamplingParams"]
