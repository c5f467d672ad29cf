"""Draws the figures of these pages: `python docs/figures.py`. Bytes come from the plan that training follows, measured
numbers from the tables of these pages.

A figure has no background, and its colours follow the reader: light, or dark if that is preferred. docs/pages.py makes one of
each for the site, which has a switch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zero.plan.budget import Budget, PlannedTraining, budget_of, default_bucket_bytes
from zero.plan.layout import FlatLayout, ParamSpec
from zero.plan.stages import STAGES

FOLDER = Path(__file__).parent / "figures"
# Classes of the style: a fill each, light and dark.
BLUE, ORANGE, GREEN, GREY, EMPTY = "blue", "orange", "green", "grey", "empty"
LIGHT = "text{fill:#24292f} .blue{fill:#8fb4d9} .orange{fill:#eab676} .green{fill:#93c9a3} .grey{fill:#d0d3d6}"
DARK = "text{fill:#e6edf3} .blue{fill:#2f5f8f} .orange{fill:#8f5a1e} .green{fill:#2f6b45} .grey{fill:#4d535a}"
BOTH = ".empty{fill:none} rect,line,path{stroke:#7d8590}"
TOY = [ParamSpec("embed", (6, 4), "float32"), ParamSpec("norm", (5,), "float32"), ParamSpec("head", (4, 6), "float32")]
# One hundred blocks of ten million parameters each, as large models have them: many, and none larger than the rest.
LARGE = [ParamSpec(f"block{i}", (10_000_000,), "bfloat16") for i in range(100)]
NUMEL = 10**9


def toy_layout() -> FlatLayout:
    """Three parameters, buckets of 32 elements, two ranks."""
    return FlatLayout.build(TOY, 2, 128, 16)


def budget(stage: int, num_ranks: int, offload: bool = False, model: Sequence[ParamSpec] = LARGE) -> Budget:
    """Returns what one rank needs that trains a large model with Adam."""
    row = STAGES[stage]
    bucket_bytes = default_bucket_bytes(sum(2 * spec.numel for spec in model), num_ranks, on_network=False)
    specs = [replace(spec, offload=float(offload)) for spec in model]
    layout = FlatLayout.build(specs, num_ranks if row.shards_optimizer else 1, bucket_bytes, 64)
    return budget_of(layout, training=PlannedTraining(shards_weights=row.shards_weights))


def _rect(x: float, y: float, width: float, height: float, fill: str, words: str = "") -> str:
    box = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{fill}"/>'
    return box + (_text(x + width / 2, y + height / 2 + 4, words, "middle") if words else "")


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def _line(x: float, top: float, bottom: float) -> str:
    return f'<path d="M{x:.1f} {top}V{bottom}" stroke-dasharray="4 3"/>'


def _svg(width: int, height: int, parts: list[str]) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    style = f"<style>{BOTH} {LIGHT} @media (prefers-color-scheme: dark){{{DARK}}}</style>"
    return "\n".join([head, style, *parts, "</svg>"]) + "\n"


def buckets() -> str:
    """The flat line: slots above, buckets below, and each rank's share of every bucket."""
    layout = toy_layout()
    starts, total = [], 0
    for chunk in layout.chunks:
        starts.append(total)
        total += chunk.numel
    unit = 680 / total
    parts = [_rect(10, 30, 680, 30, EMPTY), _text(10, 22, "the flat line: a slot for each parameter, in backward order")]
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


def bytes_a_parameter() -> str:
    """The bytes a parameter that model states take on the device of one of eight ranks, by stage."""
    parts = [_text(10, 18, "Bytes a parameter on each of 8 devices,")]
    parts.append(_text(10, 34, "bf16 weights, fp32 masters, Adam"))
    columns = [(0, False), (1, False), (2, False), (3, False), (2, True), (3, True)]
    for number, (stage, offload) in enumerate(columns):
        device, x, y = budget(stage, 8, offload).device, 10 + 64 * number, 234.0
        kinds = ((device.weights, GREEN), (device.gradients, ORANGE), (device.masters + device.moments, BLUE))
        for amount, fill in kinds:
            height = 9.5 * amount / NUMEL
            y -= height
            parts += [_rect(x, y, 52, height, fill)] if amount else []
        parts.append(_text(x + 26, y - 6, f"{sum(amount for amount, _ in kinds) / NUMEL:.4g}", "middle"))
        parts.append(_text(x + 26, 250, f"stage {stage}", "middle"))
        parts += [_text(x + 26, 265, "offloaded", "middle")] if offload else []
    for number, (words, fill) in enumerate((("weights", GREEN), ("gradients", ORANGE), ("masters and moments", BLUE))):
        parts += [_rect(10 + 100 * number, 278, 12, 12, fill), _text(28 + 100 * number, 288, words)]
    return _svg(400, 300, parts)


# Bars of the chart of models that fit, by stage and offload.
FITTING = {"plain PyTorch": (0, False), "stage 2": (2, False), "stage 3": (3, False),
           "stage 2, offload": (2, True), "stage 3, offload": (3, True)}  # fmt: skip


def largest(stage: int, offload: bool, gib: int) -> float:
    """Returns the most billions of parameters of which 8 devices of so many GiB hold the states, on a host of 1 TiB, rounded
    down."""
    billions = 10.0
    for _ in range(2):  # bytes are all but proportional to the number of parameters
        model = [ParamSpec(f"operator{number}", (int(5e6 * billions),), "bfloat16") for number in range(200)]
        needed = budget(stage, 8, offload, model)
        billions /= max(needed.peak / (gib * 2**30), 8 * needed.host_peak / 2**40)
    return int(billions) if billions >= 10 else int(10 * billions) / 10


def fit() -> str:
    """The largest model that 8 devices train, by their memory and by stage."""
    parts, top = [_text(10, 18, "Largest model on 8 devices, billions of parameters")], 40
    for gib in (24, 40, 80):
        bars = {words: largest(stage, offload, gib) for words, (stage, offload) in FITTING.items()}
        parts += [_text(140, top, f"{gib} GiB each"), *_bars(bars, top + 8, 65)]
        top += 30 + 22 * len(bars)
    return _svg(400, top - 18, parts)


# Bars of the chart by system, with the names that the table gives them.
SHOWN = {
    "ours, stage 2": "ours, stage 2", "FSDP2": "FSDP2, keeps weights", "DeepSpeed ZeRO-2": "DeepSpeed ZeRO-2",
    "ours, stage 3": "ours, stage 3", "FSDP2 resharding": "FSDP2, reshards", "DeepSpeed ZeRO-3": "DeepSpeed ZeRO-3",
}  # fmt: skip


def measured(page: str, section: str) -> dict[str, dict[str, float]]:
    """Returns the numbers of the one table of a section, by row and by column; of columns of one name, the first."""
    text = (Path(__file__).parent / f"{page}.md").read_text(encoding="utf-8").partition(f"\n## {section}\n")[2]
    lines = [line.strip("|") for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    (_, *columns), _, *rows = ([cell.strip() for cell in line.split("|")] for line in lines)
    found = dict[str, dict[str, float]]()
    for name, *cells in rows:
        numbers = [(column, cell.replace(",", "")) for column, cell in zip(columns, cells, strict=True)]
        found[name] = {column: float(cell) for column, cell in reversed(numbers) if re.fullmatch(r"[\d.]+", cell)}
    return found


def _bars(bars: Mapping[str, float], top: float, most: float) -> list[str]:
    """Returns a bar with its name and its number for each; ours are blue."""
    parts = list[str]()
    for number, (words, value) in enumerate(bars.items()):
        y, length = top + 22 * number, 200 * value / most
        parts.append(_rect(140, y, length, 16, BLUE if words.startswith(("ours", "stage")) else GREY))
        parts += [_text(132, y + 12, words, "end"), _text(146 + length, y + 12, f"{value:,.{int(value < 10)}f}")]
    return parts


def _beside_peers(title: str, column: str) -> str:
    """One column of the table of peers; a line stands where compute alone ends."""
    found = measured("performance", "Step time and memory against FSDP2 and DeepSpeed")
    bars = {words: found[name][column] for words, name in SHOWN.items()}
    most, half = max(bars.values()), len(bars) // 2
    parts = [_text(10, 18, f"{title}; the line is compute only")]
    parts += _bars(dict([*bars.items()][:half]), 28, most)
    parts += _bars(dict([*bars.items()][half:]), 36 + 22 * half, most)
    return _svg(368, 178, [*parts, _line(140 + 200 * found["compute only"][column] / most, 24, 172)])


def peers() -> str:
    """The time of a step beside that of others."""
    return _beside_peers("Step time, ms", "step, ms")


def peers_memory() -> str:
    """The peak of a rank beside that of others; on a wide page the two figures stand side by side."""
    return _beside_peers("Peak memory of a rank, MiB", "peak, MiB")


# Sections of docs/performance.md, and how the chart calls them.
TRAININGS = {
    "A usual batch": "4 x 512 tokens a rank", "Four micro-batches, four ranks": "four micro-batches of 64 tokens",
    "Compiled blocks": "stage 3, compiled blocks", "Experts": "eight experts, four ranks",
}  # fmt: skip
SYSTEMS = {"ours": "ours", "ours, stage 2": "ours", "FSDP2": "FSDP2", "DeepSpeed ZeRO-2": "DeepSpeed ZeRO-2"}


def memory() -> str:
    """The peak of a rank beside those of others, by training."""
    parts, top = [_text(10, 18, "Peak memory of a rank, MiB")], 40
    for section, words in TRAININGS.items():
        rows = measured("performance", section)
        bars = {SYSTEMS[name]: row["peak, MiB"] for name, row in rows.items() if name in SYSTEMS}
        parts += [_text(140, top, words), *_bars(bars, top + 8, 1250)]
        top += 30 + 22 * len(bars)
    return _svg(400, top - 18, parts)


WAYS = ("plain torch", "FSDP2", "DeepSpeed's Ulysses", "with its tiles", "ours", "ours, by chunks")  # rows


def long_sequences() -> str:
    """The peak of a rank with a sequence of 65,536 tokens, beside those of others."""
    rows = measured("long-sequences", "Measured").values()
    bars = {words: row["65,536, MiB"] for words, row in zip(WAYS, rows, strict=True)}
    parts = [_text(10, 18, "Peak memory of a rank with one sequence of 65,536 tokens, MiB")]
    return _svg(400, 166, parts + _bars(bars, 28, max(bars.values())))


def weight() -> str:
    """One weight in a step at stage 3: what this rank keeps of it, when it is whole, and what moves between ranks."""
    phases = (("forward", 110, 190), ("backward", 300, 230), ("settle", 530, 60), ("step", 590, 100))
    parts = []
    for words, x, width in phases:
        parts += [_rect(x, 8, width, 22, EMPTY, words), _line(x, 30, 206)]
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
        parts += [_rect(x, 8, width, 22, EMPTY, words), _line(x, 30, 248)]
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


FIGURES = {
    "buckets.svg": buckets, "bytes.svg": bytes_a_parameter, "fit.svg": fit, "gradient.svg": gradient,
    "long.svg": long_sequences, "memory.svg": memory, "peers.svg": peers, "peers_memory.svg": peers_memory,
    "weight.svg": weight,
}  # fmt: skip

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
