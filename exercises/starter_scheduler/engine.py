"""Stage 01's engine with another scheduler, over a model that answers in microseconds."""

from __future__ import annotations

import importlib
import os
from typing import Any

from shared.engine.slots import Limits
from steps import load
from tests.fakes import VOCABULARY, FakeRunner

STAGE = load("01_chunked_prefill")


def scheduler_class() -> Any:
    """The reader's, or with SCHEDULER=solution the one in solution.py."""
    module = os.environ.get("SCHEDULER", "scheduler")
    return importlib.import_module(f"exercises.starter_scheduler.{module}").Scheduler


def make_engine(
    *, budget: int = 16, num_blocks: int = 40, block_size: int = 4, max_num_sequences: int = 8
) -> Any:
    """An engine over a fake model that reads its tokens back through the block tables: a wrong
    page is a wrong token. `budget`: max_num_batched_tokens."""
    limits = Limits(
        vocab_size=VOCABULARY,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_length=num_blocks * block_size,
        max_num_sequences=min(max_num_sequences, budget),
        max_num_batched_tokens=budget,
    )
    config = STAGE.Config(
        model="qwen3-0.6b",
        load_format="dummy",
        max_num_batched_tokens=budget,
        max_num_sequences=max_num_sequences,
    )
    engine = STAGE.Engine(config, runner=FakeRunner(limits))
    engine.scheduler = scheduler_class()(config, engine.queues, engine.block_manager)
    return engine
