"""The engine contract, on every stage there is."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

import steps
from tests.engine_contract import EngineContract
from tests.online import engine_in_thread


@pytest.mark.parametrize("stage", steps.names(), scope="class")
class TestContract(EngineContract):
    @pytest.fixture(autouse=True)
    def _stage(self, stage: str) -> None:
        self.stage = stage

    def make_engine(self, module: ModuleType, config: Any) -> Any:
        if self.stage in steps.engines():
            return super().make_engine(module, config)
        # In a thread: a process for each test would take minutes, and its pool is out of reach.
        return engine_in_thread(module, config)
