"""Writes report.html, which tells what a training did and loads no other file."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero.profiling import STOPS

from .plots import layers, lines

# The plots, each with the figures in it; the report's table has all figures.
_SPLIT = {
    "forward": ("forward",),
    "backward": ("backward",),
    "reduce": ("ready", "collect", "reduce", "keep", "settle"),
    "step": ("step",),
    "publish": ("publish",),
}
_MOST_POINTS = 400

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
svg {{ width: 100% }} svg text {{ font: 12px system-ui, sans-serif; fill: #444 }} .grid {{ stroke: #ddd }}
pre {{ background: #f4f4f4; padding: .8rem; overflow-x: auto }}
</style>
<h1>{title}</h1>
<p>{summary}</p>
{sections}
</html>
"""


def write_report(path: Path, records: Sequence[Mapping[str, Any]], summary: str, stages: str, sample: str) -> None:
    """Writes the page of these records."""
    shown = records[:: -(-len(records) // _MOST_POINTS)] or records
    steps = [record["step"] for record in shown]
    split = {name: [sum(record["ms"].get(stop, 0.0) for stop in stops) for record in shown] for name, stops in _SPLIT.items()}
    num_ranks = min(len(record["memory_by_rank"]) for record in shown)
    memory = {f"rank {rank}": [record["memory_by_rank"][rank] for record in shown] for rank in range(num_ranks)}
    sections = [
        _section("Loss", lines(steps, {"loss": [record["loss"] for record in shown]}, lambda value: f"{value:.2f}")),
        _section("Time of a step on rank 0", layers(steps, split, lambda value: f"{value:g} ms"), _text(_times(records))),
        _section("What travelled, of rank 0", lines(steps, _traffic(shown), lambda value: f"{value:g} MB/s", from_zero=True)),
        _section("Memory of each rank", _memory(steps, memory)),
        _section("Bytes of rank 0 at each stage", _text(stages)),
        _section("What the model writes", _text(sample)),
    ]
    page = _PAGE.format(title="Training", summary=html.escape(summary), sections="\n".join(sections))
    path.write_text(page, encoding="utf-8")


def _traffic(records: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Megabytes a second of each step, on every way that something took."""
    ways = {"gradients": ("moved_bytes", "reduced"), "new weights": ("moved_bytes", "published"),
            "fetched weights": ("moved_bytes", "fetched"), "to the device": ("link", "to_device_bytes"),
            "to the host": ("link", "to_host_bytes"), "disk, read": ("disk", "read_bytes"),
            "disk, written": ("disk", "written_bytes")}  # fmt: skip
    seconds = [max(1e-9, sum(record["ms"].values()) / 1e3) for record in records]
    bytes_ = {way: [record.get(block, {}).get(name, 0) for record in records] for way, (block, name) in ways.items()}
    return {
        way: [amount / 1e6 / time for amount, time in zip(amounts, seconds, strict=True)]
        for way, amounts in bytes_.items()
        if any(amounts) or way == "gradients"
    }


def _memory(steps: Sequence[float], memory: Mapping[str, Sequence[float]]) -> str:
    """Draws bytes over steps; the axis has round multiples of the unit that fits the largest one."""
    largest = int(max(map(max, memory.values())))
    units = (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")
    size, unit = next((unit for unit in units if largest >= unit[0]), (1, "B"))
    return lines(steps, memory, lambda value: f"{value / size:g} {unit}", from_zero=True, unit=size)


def _times(records: Sequence[Mapping[str, Any]]) -> str:
    """The mean of each stop; the first step, which makes things, is left out where there are others."""
    counted = records[1:] or records
    sums = {name: sum(record["ms"].get(name, 0.0) for record in counted) for name in ("forward", "backward", *STOPS)}
    for block, way in (("link", "copies between device and host"), ("disk", "the disk")):
        if any(block in record for record in counted):
            sums[f"of these, waiting for {way}"] = sum(record.get(block, {}).get("waited_ms", 0.0) for record in counted)
    return "\n".join(f"{name:10}{total / len(counted):9.2f} ms" for name, total in sums.items())


def _section(title: str, *parts: str) -> str:
    return "\n".join([f"<h2>{title}</h2>", *parts])


def _text(words: str) -> str:
    return f"<pre>{html.escape(words)}</pre>"
