"""Shared test set-up: hypothesis profiles and small models made on the spot."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, settings

# Helpers' asserts explain themselves only if pytest rewrites them, which it does for tests alone.
pytest.register_assert_rewrite("tests.engine_contract", "tests.reference", "tests.fakes")

from tests.reference import Reference, make_checkpoint  # noqa: E402

# The models here are so small that threads only wait for one another; in processes that tests start
# as well.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# A job that a script has put into the background ignores Ctrl-C, and so would all it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: timings on shared machines say nothing. CI draws the same examples every time.
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Variant name -> checkpoint, made at first use."""
    return cache(lambda variant: make_checkpoint(tmp_path_factory.mktemp(variant), variant))
