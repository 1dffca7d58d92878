"""Every kernel test runs in two places: Triton's CPU interpreter (TRITON_INTERPRET=1 in the
environment, small cases) and a GPU (marked gpu)."""

from __future__ import annotations

import os

import pytest
import torch

from tests.kernels.place import Place

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _places() -> list[object]:
    interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
    cuda = [
        pytest.mark.gpu,
        pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU"),
    ]
    return [
        pytest.param(("cpu", torch.float32), id="interpreter-fp32", marks=interpreter),
        pytest.param(("cpu", torch.float16), id="interpreter-fp16", marks=interpreter),
        pytest.param(("cuda", torch.float32), id="cuda-fp32", marks=cuda),
        pytest.param(("cuda", torch.bfloat16), id="cuda-bf16", marks=cuda),
    ]


@pytest.fixture(params=_places())
def place(request: pytest.FixtureRequest) -> Place:
    device, dtype = request.param
    torch.manual_seed(0)
    return Place(torch.device(device), dtype)


@pytest.fixture
def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty returns NaN: an element that a kernel forgets to write shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
