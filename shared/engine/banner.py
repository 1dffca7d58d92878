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
    warned of when they are set to anything but their default."""
    d = description

    def gib(name: str) -> str:
        size = d[name]
        assert isinstance(size, int)
        return f"{size / _GIB:.2f} GiB"

    caching = "on" if d["enable_prefix_caching"] else "off"
    pool = f"{d['num_kvcache_blocks']} blocks = {d['tokens_in_pool']} tokens"
    taken = " + ".join(f"{part} {gib(part + '_bytes')}" for part in TAKEN_BEFORE_POOL)
    for title, text in (
        (stage, f"{d['model']} ({d['architecture']}), {d['dtype']} on {d['device_name']}"),
        (
            "attention",
            f"{d['attention_backend']}, blocks of {d['kvcache_block_size']} tokens, "
            f"prefix caching {caching}",
        ),
        ("memory", f"{taken} -> KV pool {gib('pool_bytes')} = {pool}"),
        (
            "limits",
            f"{d['max_model_length']} tokens a sequence, {d['max_num_sequences']} sequences, "
            f"{d['max_num_batched_tokens']} tokens a step",
        ),
        ("CUDA graphs", d["cuda_graphs"] or "none (eager)"),
    ):
        logger.info("%s: %s", title, text)
    fields = type(config).model_fields
    for name in ignored:
        if getattr(config, name) != fields[name].default:
            logger.warning("%s has no effect in %s", name, stage)
