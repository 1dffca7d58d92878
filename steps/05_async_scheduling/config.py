"""The options of this stage: those of stage 02."""

from __future__ import annotations

from pydantic import NonNegativeInt

from steps import load


class Config(load("02_batch_reorder").Config):  # type: ignore[misc]
    """Sizes of prefills, and how long they may let decodes have the step for themselves."""

    max_prefill_defer: NonNegativeInt = 0
    """Most steps in a row for which waiting prompts let the running decodes have the step for
    themselves. 0 by default: a prompt that arrives waits for a step in flight already."""
