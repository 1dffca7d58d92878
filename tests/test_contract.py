"""The engine contract, on every stage there is."""

from __future__ import annotations

import pytest

import steps
from tests.engine_contract import EngineContract


@pytest.mark.parametrize("stage", steps.names(), scope="class")
class TestContract(EngineContract):
    @pytest.fixture(autouse=True)
    def _stage(self, stage: str) -> None:
        self.stage = stage
