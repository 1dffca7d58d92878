"""Replicas behind one engine for a loop: the contract, who gets what, and what one's end ends."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from tests.engine_contract import EngineContract
from tests.online import engine_in_thread
from tests.reference import Reference


class TestContract(EngineContract):
    """With two replicas. With one, tests/test_contract.py has it."""

    stage = "04_dp_tp"

    def engine(self, reference: Reference, **config: Any) -> AbstractContextManager[Any]:
        return super().engine(reference, **{"data_parallel_size": 2, **config})

    def make_engine(self, module: ModuleType, config: Any) -> Any:
        return engine_in_thread(module, config)
