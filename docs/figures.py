"""Draws the figures of docs/sharding.md: `python docs/figures.py`. Numbers come from the plan that training follows."""

from __future__ import annotations

from pathlib import Path

from zero.plan.budget import Budget, PlannedTraining, budget_of, default_bucket_bytes
from zero.plan.layout import FlatLayout, ParamSpec
from zero.plan.stages import STAGES

FOLDER = Path(__file__).parent / "figures"
BLUE, ORANGE, GREEN, GREY = "#4878a8", "#d98b3a", "#5a9e6f", "#b8b8b8"
TOY = [ParamSpec("embed", (6, 4), "float32"), ParamSpec("norm", (5,), "float32"), ParamSpec("head", (4, 6), "float32")]
# One hundred blocks of ten million parameters each, as large models have them: many, and none larger than the rest.
LARGE = [ParamSpec(f"block{i}", (10_000_000,), "bfloat16") for i in range(100)]


def toy_layout() -> FlatLayout:
    """Three parameters, buckets of 32 elements, two ranks."""
    return FlatLayout.build(TOY, 2, 128, 16)


def budget(stage: int, num_ranks: int) -> Budget:
    """Of one rank that trains the large model with Adam."""
    row = STAGES[stage]
    bucket_bytes = default_bucket_bytes(sum(2 * spec.numel for spec in LARGE), num_ranks, on_network=False)
    layout = FlatLayout.build(LARGE, num_ranks if row.shards_optimizer else 1, bucket_bytes, 64)
    return budget_of(layout, training=PlannedTraining(shards_weights=row.shards_weights))


def _rect(x: float, y: float, width: float, height: float, fill: str, words: str = "") -> str:
    box = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" stroke="#333"/>'
    return box + (_text(x + width / 2, y + height / 2 + 4, words, "middle") if words else "")


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def _svg(width: int, height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def buckets() -> str:
    """The flat line: slots above, buckets below, and each rank's share of every bucket."""
    layout = toy_layout()
    starts, total = [], 0
    for chunk in layout.chunks:
        starts.append(total)
        total += chunk.numel
    unit = 680 / total
    parts = [_rect(10, 30, 680, 30, "white"), _text(10, 22, "the flat line: a slot for each parameter, in backward order")]
    for slot in layout.slots:
        assert slot is not None
        x = 10 + unit * (starts[slot.chunk] + slot.span.start)
        parts.append(_rect(x, 30, unit * slot.span.numel, 30, GREEN, layout.params[slot.param].name))
    parts.append(_text(10, 88, "cut into buckets, and every bucket into one equal share for each rank"))
    for number, bucket in enumerate(layout.buckets):
        for rank, fill in enumerate((BLUE, ORANGE)):
            x = 10 + unit * (starts[bucket.chunk] + bucket.span.start + rank * bucket.share_numel)
            parts.append(_rect(x, 96, unit * bucket.share_numel, 30, fill, f"rank {rank}"))
        x = 10 + unit * (starts[bucket.chunk] + bucket.span.start)
        parts.append(_text(x, 142, f"bucket {number}"))
    return _svg(700, 150, parts)


def bytes_per_rank() -> str:
    """The most that model states take on one rank in a step of several micro-batches, by stage and number of ranks."""
    parts = [_text(10, 18, "GiB on one rank, a billion bf16 parameters and Adam, in a step of several micro-batches")]
    columns = [(0, 1), *((stage, ranks) for stage in (1, 2, 3) for ranks in (2, 8, 64))]
    scale = 190 / (budget(0, 1).peak / 2**30)
    for number, (stage, ranks) in enumerate(columns):
        found, x, y = budget(stage, ranks), 14 + 69 * number, 240.0
        waiting = found.device.weights if STAGES[stage].accumulates_locally else 0  # whole, in .grad, until they are sent
        gradients = max(found.device.gradients, waiting)
        states = found.device.masters + found.device.moments
        for amount, fill in ((found.device.weights, GREEN), (gradients, ORANGE), (states, BLUE)):
            height = scale * amount / 2**30
            y -= height
            parts.append(_rect(x, y, 52, height, fill))
        whole = found.device.weights + gradients + found.device.masters + found.device.moments
        parts.append(_text(x + 26, y - 6, f"{whole / 2**30:.1f}", "middle"))
        parts.append(_text(x + 26, 256, f"stage {stage}", "middle"))
        parts.append(_text(x + 26, 271, "any ranks" if stage == 0 else f"{ranks} ranks", "middle"))
    for number, (words, fill) in enumerate((("weights", GREEN), ("gradients", ORANGE), ("masters and moments", BLUE))):
        parts += [_rect(20 + 110 * number, 284, 12, 12, fill), _text(38 + 110 * number, 294, words)]
    return _svg(700, 304, parts)


def weight() -> str:
    """One weight in a step at stage 3: what this rank keeps of it, when it is whole, and what moves between ranks."""
    phases = (("forward", 110, 190), ("backward", 300, 230), ("settle", 530, 60), ("step", 590, 100))
    parts = []
    for words, x, width in phases:
        parts += [_rect(x, 8, width, 22, "white", words), f'<path d="M{x} 30V206" stroke="#ccc" stroke-dasharray="4 3"/>']
    rows = (("its share", 50), ("whole", 92), ("its gradient", 134), ("between ranks", 182))
    parts += [_text(10, y + 18, words) for words, y in rows]
    parts += [_rect(110, 50, 480, 26, BLUE, "this rank's share, as of step n"), _rect(590, 50, 100, 26, BLUE, "n + 1")]
    for x, words in ((170, "used"), (370, "used")):
        parts += [_rect(x, 92, 62, 26, GREEN, words), _rect(x - 44, 92, 44, 26, GREY, "fetch")]
    parts += [_text(248, 110, "freed"), _text(448, 110, "freed")]
    parts += [_rect(432, 134, 98, 26, ORANGE, "in its bucket"), _rect(530, 134, 60, 26, ORANGE, "share")]
    parts += [_text(x, 200, "all weights once", "middle") for x in (170, 370, 500)]
    return _svg(700, 212, parts)


def gradient() -> str:
    """One gradient from autograd to the weights of all ranks: what holds it at each stop, and when ranks exchange something."""
    phases = (("backward", 110, 330), ("settle", 440, 70), ("step", 510, 90), ("publish", 600, 90))
    parts = []
    for words, x, width in phases:
        parts += [_rect(x, 8, width, 22, "white", words), f'<path d="M{x} 30V248" stroke="#ccc" stroke-dasharray="4 3"/>']
    rows = (("autograd", 50), ("staging buffer", 92), ("gradient shard", 134), ("master", 176), ("weight", 218))
    parts += [_text(10, y + 18, words) for words, y in rows]
    parts += [_rect(120, 50, 70, 26, ORANGE, "ready")]
    parts += [_rect(190, 92, 90, 26, ORANGE, "collect"), _rect(280, 92, 90, 26, GREY, "reduce")]
    parts += [_rect(370, 134, 70, 26, ORANGE, "keep"), _rect(440, 134, 160, 26, ORANGE, "its sum, one share a rank")]
    parts += [_rect(110, 176, 400, 26, BLUE, "this rank's share of the masters"), _rect(510, 176, 90, 26, BLUE, "stepped")]
    parts += [_rect(110, 218, 490, 26, GREEN, "whole, on every rank (stages 0 to 2)"), _rect(600, 218, 90, 26, GREEN, "new")]
    exchanged = ((325, "a bucket"), (475, "two messages"), (645, "the new weights"))
    parts += [_text(x, 266, words, "middle") for x, words in exchanged]
    return _svg(700, 276, [*parts, _text(10, 266, "between ranks")])


FIGURES = {"buckets.svg": buckets, "bytes.svg": bytes_per_rank, "gradient.svg": gradient, "weight.svg": weight}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
