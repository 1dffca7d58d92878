"""What a reader of the log should know when an engine starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from shared.config import EngineConfig

logger = logging.getLogger("baby_vllm")

_GIB = 1 << 30
TAKEN_BEFORE_POOL = ("weights", "activations", "graphs")


def log_banner(
    stage: str, description: Mapping[str, object], config: EngineConfig, ignored: tuple[str, ...]
) -> None:
    """Log effective settings; `ignored` names options that this stage does not act on, which are
    warned of when they are set to anything but their default or what is in effect all the same: a
    runner from outside may act on them."""
    d = description

    def gib(name: str) -> str:
        size = d[name]
        assert isinstance(size, int)
        return f"{size / _GIB:.2f} GiB"

    pool = f"{d['num_kvcache_blocks']} blocks = {d['tokens_in_pool']} tokens"
    taken = " + ".join(f"{part} {gib(part + '_bytes')}" for part in TAKEN_BEFORE_POOL)
    lines = {
        stage: f"{d['model']} ({d['architecture']}), {d['dtype']} on {d['device_name']}",
        "attention": f"{d['attention_backend']}, {d['kvcache_block_size']} tokens a block",
        "prefix caching": "on" if d["enable_prefix_caching"] else "off",
        "memory": f"{taken} -> KV pool {gib('pool_bytes')} = {pool}",
        "tokens a sequence, at most": d["max_model_length"],
        "sequences and tokens a step, at most": (
            f"{d['max_num_sequences']}, {d['max_num_batched_tokens']}"
        ),
        "CUDA graphs": d["cuda_graphs"] or "none (eager)",
        "parallel": (
            f"tensor {d.get('tensor_parallel_size', 1)}, data {d.get('data_parallel_size', 1)}"
        ),
    }
    fields = type(config).model_fields
    if own := [name for name in fields if name not in EngineConfig.model_fields]:
        lines["of this stage"] = ", ".join(f"{name} {getattr(config, name)}" for name in own)
    for title, text in lines.items():
        logger.info("%s: %s", title, text)
    for name in ignored:
        if getattr(config, name) not in (fields[name].default, d.get(name)):
            logger.warning("%s has no effect in %s", name, stage)
