"""The options that this stage adds."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shared.config import ChunkedPrefillConfig


class Config(ChunkedPrefillConfig):
    """Sizes of prefills, and how long they may let decodes have the step for themselves."""

    max_prefill_defer: Annotated[int, Field(ge=0)] = 3
    """Most steps in a row for which waiting prompts let the running decodes have the step for
    themselves."""
