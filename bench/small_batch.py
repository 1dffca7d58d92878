"""Linear layers of a decode step of few rows: shared.kernels.small_batch_linear against the
library's product with separate kernels for norm and activation.

    python -m bench.small_batch [--json bench/results/small_batch_h200.json]

For each product of a Qwen3 layer, for the four of them in turn, and for the LM head, with the
norms, the activation and the sums of the residual stream, wherever they are added: microseconds of
one call, bf16, in a CUDA graph over weights that together exceed the L2 cache several times;
the floor is the weights' bytes at the measured bandwidth. `route` says which of the two the public
functions take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import torch
import torch.nn.functional as F
import tyro

from bench.floor import measure_rates
from bench.gpu import hardware
from bench.kernels import DTYPE, ROTATED_BYTES, measure_call, randn
from bench.result import (
    Hardware,
    git_state,
    library_versions,
    now,
    prepare_output,
    write_json,
)
from shared.kernels.rms_norm import add_rms_norm
from shared.kernels.silu_and_mul import silu_and_mul
from shared.kernels.small_batch_linear import (
    MAX_ROWS,
    ResidualStream,
    linear_add_triton,
    linear_triton,
    norm_linear_triton,
    takes_kernel,
)

SCHEMA_VERSION = 1
EPS = 1e-6
ROWS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Product:
    name: str
    weight_rows: int
    size: int
    normed: bool = False
    gated: bool = False
    adds: bool = False

    def weight(self) -> torch.Tensor:
        return randn(self.weight_rows, self.size) * self.size**-0.5


@dataclass(frozen=True)
class Model:
    name: str
    layer: tuple[Product, ...]
    head: Product


def qwen3(name: str, hidden: int, heads: int, intermediate: int) -> Model:
    """8 KV heads of 128, 151936 tokens."""
    layer = (
        Product("qkv", (heads + 16) * 128, hidden, normed=True),
        Product("o", hidden, heads * 128, adds=True),
        Product("gate_up", 2 * intermediate, hidden, normed=True, gated=True),
        Product("down", hidden, intermediate, adds=True),
    )
    return Model(name, layer, Product("head", 151936, hidden))


MODELS = (qwen3("Qwen3-0.6B", 1024, 16, 3072), qwen3("Qwen3-8B", 4096, 32, 12288))


class Measurement(msgspec.Struct, frozen=True):
    model: str
    operation: str
    rows: int
    floor_us: float
    library_us: float
    kernel_us: float
    spread: float
    """(slowest - fastest) / median over the replays, the larger of the two."""
    route: Literal["kernel", "library", "mixed"]


class Report(msgspec.Struct, frozen=True):
    schema_version: int
    time: str
    commit: str | None
    dirty: bool | None
    hardware: Hardware
    versions: dict[str, str]
    copy_gb_per_second: float
    rows: list[Measurement]


class Inputs:
    """What the calls of one product share: each writes the same outputs again."""

    def __init__(self, product: Product, rows: int) -> None:
        self.product = product
        self.x, self.residual = randn(rows, product.size), randn(rows, product.size)
        # Separate operations work in place: repeated, they must stay finite.
        self.separate_x, self.separate_residual = self.x.clone(), self.residual.clone()
        self.norm_weight = randn(product.size)
        self.to_add = randn(rows, product.weight_rows)
        self.stream = ResidualStream(self.x, self.residual)
        if rows > 1 and product.normed:  # as the product before leaves it
            before = Product("before", product.size, product.size).weight()
            self.stream = linear_add_triton(self.x, before, self.residual)

    def library(self, weight: torch.Tensor) -> torch.Tensor:
        x = self.separate_x
        if self.product.normed:
            x, _ = add_rms_norm(x, self.separate_residual, self.norm_weight, EPS)
        out = F.linear(x, weight)
        return silu_and_mul(out) if self.product.gated else out

    def kernel(self, weight: torch.Tensor) -> torch.Tensor:
        if self.product.normed:
            product = self.product
            return norm_linear_triton(self.stream, self.norm_weight, EPS, weight, product.gated)[0]
        if self.product.adds and self.x.shape[0] > 1:
            return linear_add_triton(self.x, weight, self.to_add).x
        return linear_triton(self.x, weight)


def measure(
    model: str, name: str, products: Sequence[Product], rows: int, bandwidth: float
) -> Measurement:
    """Calls of the products in turn, as one operation."""
    moved = sum(p.weight_rows * p.size * DTYPE.itemsize for p in products)
    sets = [[p.weight() for p in products] for _ in range(max(2, -(-ROTATED_BYTES // moved)))]
    inputs = [Inputs(p, rows) for p in products]
    routes = {
        "kernel" if takes_kernel(i.x, w) else "library"
        for i, w in zip(inputs, sets[0], strict=True)
    }

    def timed(method: Callable[[Inputs, torch.Tensor], object]) -> tuple[float, float]:
        def call(weights: list[torch.Tensor]) -> Callable[[], None]:
            def run() -> None:
                for i, weight in zip(inputs, weights, strict=True):
                    method(i, weight)

            return run

        calls = [call(weights) for weights in sets]
        for run in calls:  # each weight once outside the capture
            run()
        return measure_call(calls)

    library, library_spread = timed(Inputs.library)
    kernel, kernel_spread = timed(Inputs.kernel)
    return Measurement(
        model,
        name,
        rows,
        moved / bandwidth * 1e6,
        library * 1e6,
        kernel * 1e6,
        max(library_spread, kernel_spread),
        "mixed" if len(routes) > 1 else routes.pop(),  # type: ignore[arg-type]
    )


def main(json: Path | None = None) -> None:
    """Measure on the first GPU; `json` is where the full report goes."""
    prepare_output(json, "--json")
    torch.manual_seed(0)
    bandwidth = measure_rates("cuda", DTYPE, 0).bandwidth
    measurements = []
    for model in MODELS:
        for rows in ROWS:
            assert rows <= MAX_ROWS
            for name, products in (
                *((p.name, (p,)) for p in (*model.layer, model.head)),
                ("layer", model.layer),
            ):
                row = measure(model.name, name, products, rows, bandwidth)
                measurements.append(row)
                print(
                    f"{row.model:12}{row.operation:8}{rows:3} rows  floor {row.floor_us:6.1f}  "
                    f"library {row.library_us:6.1f}  kernel {row.kernel_us:6.1f}  "
                    f"+-{100 * row.spread:2.0f}%  {row.route}"
                )
                torch.cuda.empty_cache()
    if json is None:
        return
    commit, dirty = git_state()
    report = Report(
        SCHEMA_VERSION,
        now(),
        commit,
        dirty,
        hardware("cuda"),
        library_versions(),
        bandwidth / 1e9,
        measurements,
    )
    write_json(json, report)


if __name__ == "__main__":
    tyro.cli(main, prog="python -m bench.small_batch")
