"""Linear layers of few rows, with norm and gated activation, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from shared.kernels import small_batch_linear
from shared.kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from shared.kernels.silu_and_mul import silu_and_mul_reference
from shared.kernels.small_batch_linear import (
    ResidualStream,
    few_rows_tile,
    linear,
    linear_add,
    linear_add_triton,
    linear_triton,
    norm_gate_up,
    norm_linear,
    norm_linear_triton,
)
from tests.kernels.place import Place

# (outputs, K): whole tiles, neither a whole number of tiles, less than a tile, K that no vector
# load divides, many shares of K, a number of tiles that is no power of two.
SHAPES = [(64, 1024), (37, 1160), (13, 40), (16, 77), (77, 1536), (140, 256)]
ROWS = [1, 5, 16]
EPS = 1e-6


@pytest.fixture(params=["one step", "steps", "steps and shares"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How several rows go through a weight."""
    if request.param != "one step":
        programs = 1 if request.param == "steps" else 12
        monkeypatch.setattr(small_batch_linear, "_SMALL_WEIGHT", 0)
        monkeypatch.setattr(small_batch_linear, "_PROGRAMS", programs)


def make_weight(place: Place, outputs: int, size: int) -> torch.Tensor:
    return place.randn(outputs, size, scale=size**-0.5)


def exact_norm(summed: torch.Tensor, norm_weight: torch.Tensor) -> torch.Tensor:
    return rms_norm_reference(summed.double().cpu(), norm_weight.double().cpu(), EPS)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("outputs, size", SHAPES)
def test_linear(
    place: Place, poison_empty: None, way: None, outputs: int, size: int, rows: int
) -> None:
    x, weight = place.randn(rows, size), make_weight(place, outputs, size)
    exact = x.double().cpu() @ weight.double().cpu().T
    for _ in range(2):  # the first call leaves its counters at zero
        place.assert_close(linear_triton(x, weight), exact)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("outputs, size", SHAPES)
def test_norm_linear(
    place: Place, poison_empty: None, way: None, outputs: int, size: int, rows: int, gated: bool
) -> None:
    x, residual = place.randn(rows, size, scale=3.0), place.randn(rows, size)
    norm_weight = place.randn(size)
    weight = make_weight(place, 2 * outputs if gated else outputs, size)
    summed = x + residual

    out, added = norm_linear_triton(ResidualStream(x, residual), norm_weight, EPS, weight, gated)

    # The sum is rounded to the storage type before it is normalised.
    assert torch.equal(added, summed)
    exact = exact_norm(added, norm_weight) @ weight.double().cpu().T
    place.assert_close(out, silu_and_mul_reference(exact) if gated else exact)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [2, 5, 16])
@pytest.mark.parametrize("outputs, size", SHAPES)
def test_one_product_adds_and_the_next_takes_its_squares(
    place: Place, poison_empty: None, way: None, outputs: int, size: int, rows: int, gated: bool
) -> None:
    x, residual = place.randn(rows, size), place.randn(rows, outputs, scale=3.0)
    weight = make_weight(place, outputs, size)
    norm_weight = place.randn(outputs)
    next_weight = make_weight(place, 2 * 70 if gated else 70, outputs)

    stream = linear_add_triton(x, weight, residual)
    assert stream.residual is None
    exact = x.double().cpu() @ weight.double().cpu().T + residual.double().cpu()
    place.assert_close(stream.x, exact)
    assert stream.squares is not None
    summed = stream.squares.sum(0)[:rows].cpu()
    torch.testing.assert_close(summed, stream.x.float().cpu().square().sum(1))

    out, added = norm_linear_triton(stream, norm_weight, EPS, next_weight, gated)
    assert added is stream.x
    exact = exact_norm(added, norm_weight) @ next_weight.double().cpu().T
    place.assert_close(out, silu_and_mul_reference(exact) if gated else exact)


def test_a_row_of_zeros_stays_one(place: Place, poison_empty: None) -> None:
    weight, norm_weight = make_weight(place, 64, 64), place.randn(64)
    stream = linear_add_triton(place.randn(3, 64) * 0, weight, place.randn(3, 64) * 0)
    out, _ = norm_linear_triton(stream, norm_weight, EPS, weight)
    assert not out.any()


@pytest.mark.parametrize("rows", [1, 4])
def test_without_a_residual_the_sum_is_x(place: Place, poison_empty: None, rows: int) -> None:
    x, norm_weight, weight = place.randn(rows, 64), place.randn(64), make_weight(place, 24, 64)
    out, added = norm_linear_triton(ResidualStream(x), norm_weight, EPS, weight)
    assert added is x
    place.assert_close(out, exact_norm(x, norm_weight) @ weight.double().cpu().T)


@pytest.mark.parametrize("rows", [1, 4])
def test_large_residuals_and_zero_rows(place: Place, poison_empty: None, rows: int) -> None:
    """The factor of the norm multiplies the result: nothing before it may overflow."""
    scale = 30.0 if place.dtype == torch.float16 else 3e4
    x, norm_weight, weight = place.randn(rows, 64, scale=scale), place.randn(64), place.randn(8, 64)
    x[-1] = 0.0
    out, _ = norm_linear_triton(ResidualStream(x), norm_weight, EPS, weight)
    assert not out[-1].any()
    if rows > 1:
        place.assert_close(out, exact_norm(x, norm_weight) @ weight.double().cpu().T)


@pytest.mark.parametrize("rows", [0, 17])
def test_refuses_other_row_counts(place: Place, rows: int) -> None:
    x, weight = place.randn(rows, 16), place.randn(4, 16)
    with pytest.raises(ValueError, match=f"{rows} rows"):
        linear_triton(x, weight)
    with pytest.raises(ValueError, match="1 rows"):
        linear_add_triton(place.randn(1, 16), weight, place.randn(1, 4))


def test_tiles_cover_a_weight_whatever_its_shape() -> None:
    for weight_rows in (1, 64, 1000, 4096, 24576, 151936):
        for size in (1, 256, 257, 1000, 1024, 2560, 4096, 9728, 12288, 1 << 20):
            for element_size in (2, 4):
                for num_rows in (2, 8, 9, 16):
                    tile = few_rows_tile(num_rows, weight_rows, size, element_size)
                    assert tile.rows >= num_rows
                    assert tile.splits * tile.steps * tile.block_k >= size
                    assert tile.splits * (tile.steps - 1) * tile.block_k < size
                    assert tile.splits <= 16


@pytest.mark.parametrize("rows", [1, 3])
def test_public_functions_take_the_separate_operations_on_cpu(rows: int) -> None:
    x, residual, norm_weight = torch.randn(rows, 32), torch.randn(rows, 32), torch.randn(32)
    weight = torch.randn(12, 32)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    normed, summed = add_rms_norm_reference(x, residual, norm_weight, EPS)
    stream = ResidualStream(x, residual)
    out, added = norm_linear(stream, norm_weight, EPS, weight)
    assert torch.equal(out, F.linear(normed, weight))
    assert torch.equal(added, summed)
    out, added = norm_gate_up(stream, norm_weight, EPS, weight)
    assert torch.equal(out, silu_and_mul_reference(F.linear(normed, weight)))
    assert torch.equal(added, summed)
    out, added = norm_linear(ResidualStream(x), norm_weight, EPS, weight)
    assert torch.equal(out, F.linear(rms_norm_reference(x, norm_weight, EPS), weight))
    assert added is x
    product, others, squares = linear_add(x, weight, torch.ones(rows, 12))
    assert torch.equal(product, F.linear(x, weight))
    assert torch.equal(others, torch.ones(rows, 12))
    assert squares is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    place = Place(torch.device("cuda"), torch.bfloat16)

    @pytest.mark.parametrize("rows", [1, 2, 8, 16, 40])
    @pytest.mark.parametrize(
        "outputs, size", [(4096, 1024), (1024, 3072), (6144, 4096), (4096, 12288), (151936, 1024)]
    )
    def test_real_shapes_on_either_side_of_the_crossovers(
        self, outputs: int, size: int, rows: int
    ) -> None:
        torch.manual_seed(0)
        place = self.place
        x, residual = place.randn(rows, size), place.randn(rows, size)
        norm_weight, weight = place.randn(size), make_weight(place, outputs, size)
        summed = x + residual
        wide = weight.double().cpu().T
        place.assert_close(linear(x, weight), x.double().cpu() @ wide)
        exact = exact_norm(summed, norm_weight) @ wide
        both = ResidualStream(x.clone(), residual.clone())
        out, added = norm_linear(both, norm_weight, EPS, weight)
        assert torch.equal(added, summed)
        place.assert_close(out, exact)
        out, _ = norm_gate_up(ResidualStream(x, residual), norm_weight, EPS, weight)
        place.assert_close(out, silu_and_mul_reference(exact))

    @pytest.mark.parametrize("rows", [1, 6, 11])
    @pytest.mark.parametrize("small_weight", [None, 0])
    def test_overlapping_kernels_wait_for_their_input(
        self, rows: int, small_weight: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A chain in a CUDA graph, each kernel reading what the one before it wrote last."""
        torch.manual_seed(0)
        place, depth, size = self.place, 40, 1024
        norm_weight = place.randn(size)
        weights = [
            (make_weight(place, 4096, size), make_weight(place, size, 2048)) for _ in range(depth)
        ]
        first = place.randn(rows, size)
        if small_weight is not None:
            monkeypatch.setattr(small_batch_linear, "_SMALL_WEIGHT", small_weight)

        def chain(after_each: Callable[[], None]) -> torch.Tensor:
            stream = ResidualStream(first.clone(), torch.zeros_like(first))
            for gate_up, down in weights:
                x, residual = norm_linear_triton(stream, norm_weight, EPS, gate_up, gated=True)
                after_each()
                stream = linear_add(x, down, residual)
                after_each()
            return stream.sum()

        expected = chain(torch.cuda.synchronize)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(lambda: None)
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, expected)

    def test_a_first_call_inside_a_capture_is_refused(self) -> None:
        x, weight = self.place.randn(4, 1024), self.place.randn(64, 1024)
        linear(x, weight.clone())
        with (
            pytest.raises(RuntimeError, match="before it is captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            linear(x, weight)

    def test_row_counts_share_one_compiled_kernel(self) -> None:
        place = self.place
        weight = place.randn(64, 128)
        linear(place.randn(2, 128), weight)
        caches = small_batch_linear._few_rows_kernel.device_caches
        compiled = sum(len(cache[0]) for cache in caches.values())
        for rows in range(2, 9):
            linear(place.randn(rows + 1, 128)[1:], weight)
        assert sum(len(cache[0]) for cache in caches.values()) == compiled
