"""The floor of one decode step by batch size, from a model's config and measured rates.

The same arithmetic as `bench.floor.ModelCost`, which needs torch; a test compares the two.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from bench.svg import FAINT, INK, LINE, Picture
from tools.docsite import ROOT, results

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
RATES = "kernels_h200.json"
WEIGHTS, KV, ARITHMETIC = "#3b78bd", "#5aa457", "#c8641b"


@dataclass(frozen=True)
class Cost:
    """bfloat16: two bytes per value."""

    weight_bytes: int
    kv_bytes: int  # per token
    flops: int  # per sequence, attention excluded
    attention_flops: int  # per token attended to


def cost_of(model: str) -> Cost:
    """Raises ValueError for a model without a config in shared/models/configs."""
    path = ROOT / "shared" / "models" / "configs" / f"{model}.json"
    if not path.exists():
        raise ValueError(f"no config for {model!r}")
    config = json.loads(path.read_text())
    head_dim, layers = config["head_dim"], config["num_hidden_layers"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    layer = config["hidden_size"] * (2 * q_size + 2 * kv_size + 3 * config["intermediate_size"])
    matrices = layer * layers + config["vocab_size"] * config["hidden_size"]
    return Cost(2 * matrices, 2 * kv_size * layers * 2, 2 * matrices, 4 * q_size * layers)


@dataclass(frozen=True)
class Step:
    """Milliseconds that one decode step cannot go below."""

    batch: int
    weights: float
    kv: float
    arithmetic: float

    @property
    def floor(self) -> float:
        return max(self.weights + self.kv, self.arithmetic)


def steps(cost: Cost, context: int, bandwidth: float, matmul: float) -> list[Step]:
    """`context`: tokens in every sequence; bytes/s; FLOP/s."""
    return [
        Step(
            batch,
            cost.weight_bytes / bandwidth * 1e3,
            batch * context * cost.kv_bytes / bandwidth * 1e3,
            batch * (cost.flops + context * cost.attention_flops) / matmul * 1e3,
        )
        for batch in BATCHES
    ]


def section(model: str, context: str) -> str:
    """A table and a picture for a page."""
    report = json.loads((results.RESULTS / RATES).read_text())
    bandwidth = report["copy_gb_per_second"] * 1e9
    matmul = report["matmul_tflop_per_second"] * 1e12
    found = steps(cost_of(model), int(context), bandwidth, matmul)
    lines = [
        f"**{model}, bfloat16, {int(context):,} tokens of context in every sequence**",
        "",
        "| sequences | weights ms | KV ms | arithmetic ms | floor ms | tokens/s at the floor |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {s.batch} | {s.weights:.3f} | {s.kv:.3f} | {s.arithmetic:.3f} | {s.floor:.3f} | "
        f"{s.batch / s.floor * 1e3:,.0f} |"
        for s in found
    ]
    lines += [
        "",
        (
            "<small>Computed, not measured: bytes over "
            f"{report['copy_gb_per_second']:,.0f} GB/s and FLOPs over "
            f"{report['matmul_tflop_per_second']:,.0f} TFLOP/s, the rates of "
            f"`bench/results/{RATES}` ({report['hardware']['gpus'][0]['name']}).</small>"
        ),
    ]
    return "\n".join(lines)


def picture(model: str, context: str) -> str:
    """Milliseconds by number of sequences, both axes logarithmic."""
    report = json.loads((results.RESULTS / RATES).read_text())
    bandwidth = report["copy_gb_per_second"] * 1e9
    matmul = report["matmul_tflop_per_second"] * 1e12
    found = steps(cost_of(model), int(context), bandwidth, matmul)
    values = [v for s in found for v in (s.weights, s.kv, s.arithmetic, s.floor)]
    low, high = _decade(min(values), False), _decade(max(values), True)
    left, top, width, height = 60.0, 34.0, 560.0, 220.0
    drawing = Picture()

    def x_of(batch: int) -> float:
        return left + width * (batch.bit_length() - 1) / (BATCHES[-1].bit_length() - 1)

    def y_of(milliseconds: float) -> float:
        return top + height * (high - math.log10(milliseconds)) / (high - low)

    for exponent in range(low, high + 1):
        y = y_of(10.0**exponent)
        drawing.line([(left, y), (left + width, y)], "#b9b9b9", 0.6)
        drawing.text(left - 8, y + 4, f"{10.0**exponent:g}", anchor="end", size=10, fill=FAINT)
    for batch in BATCHES:
        drawing.text(x_of(batch), top + height + 16, str(batch), size=10, fill=FAINT)
    drawing.text(left + width / 2, top + height + 32, "sequences in the step", fill=FAINT)
    drawing.text(left - 8, top - 14, "ms", anchor="end", fill=FAINT)
    curves = (
        ("weights", WEIGHTS, [s.weights for s in found]),
        ("KV", KV, [s.kv for s in found]),
        ("arithmetic", ARITHMETIC, [s.arithmetic for s in found]),
    )
    x = left
    for name, colour, ys in curves:
        points = [(x_of(b), y_of(y)) for b, y in zip(BATCHES, ys, strict=True)]
        drawing.line(points, colour, 2.0)
        drawing.rect(x, 8, 12, 12, colour)
        drawing.text(x + 17, 18, name, anchor="start", fill=INK)
        x += 100
    floor = [(x_of(s.batch), y_of(s.floor)) for s in found]
    drawing.line(floor, LINE, 3.5, dashed=True)
    drawing.rect(x, 12, 12, 4, LINE)
    drawing.text(x + 17, 18, "floor: the larger of memory and arithmetic", anchor="start", fill=INK)
    title = f"Floor of a decode step of {model} with {context} tokens of context, by batch size"
    return drawing.svg(left + width + 30, top + height + 42, title)


def _decade(value: float, up: bool) -> int:
    exponent = math.log10(value)
    return math.ceil(exponent) if up else math.floor(exponent)
