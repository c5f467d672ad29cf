"""Draws bars and curves as SVG text, without a plotting library."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from html import escape

ROW, LABEL, WIDTH, TOP = 24, 170, 760, 40


def bars(title: str, values: dict[str, float], unit: str = "ms") -> str:
    """A bar a name, the longest as wide as there is room; ours are darker, and a line stands where the bare one ends."""
    most = max(values.values())
    room = WIDTH - LABEL - 80
    height = TOP + ROW * len(values) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="13">{escape(title)}</text>',
    ]
    for number, (name, value) in enumerate(values.items()):
        y, long = TOP + ROW * number, room * value / most
        colour = "#1f5fa8" if name.startswith("ours") else "#9aa5b1"
        lines.append(f'<text x="{LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        lines.append(f'<rect x="{LABEL}" y="{y + 3}" width="{long:.1f}" height="{ROW - 7}" fill="{colour}"/>')
        lines.append(f'<text x="{LABEL + long + 6:.1f}" y="{y + 15}">{value:.0f} {unit}</text>')
    if "bare" in values:
        x = LABEL + room * values["bare"] / most
        lines.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{height - 8}" stroke="#555" stroke-dasharray="4 3"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


CURVE, GAP, BIN_S = 30, 6, 0.005
Watched = tuple[Sequence[Sequence[float]], Sequence[float]]  # samples and marks of peer_systems.py


def steps(title: str, watched: Mapping[str, Watched], gbit: float) -> str:
    """Draws three curves for each system over the time of a step: the bytes that leave the host and those that come, as a
    fraction of the link's speed, and the number of busy processors. Vertical lines mark the ends of backward and step."""
    most = max(marks[2] - marks[0] for _, marks in watched.values())
    room, panel = WIDTH - LABEL - 20, 3 * (CURVE + GAP) + 16
    height = TOP + panel * len(watched) + 24
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="13">{escape(title)}</text>',
    ]
    for number, (name, (samples, (begin, middle, end))) in enumerate(watched.items()):
        top = TOP + panel * number
        for at, (what, full) in enumerate({"sent": gbit * 1e9 / 8, "came": gbit * 1e9 / 8, "processor": 1.0}.items()):
            base = top + at * (CURVE + GAP) + CURVE
            points = [
                f"{LABEL + room * (time - begin) / most:.1f},{base - CURVE * min(1.0, speed / full):.1f}"
                for time, speed in _speeds(samples, 1 + at)
                if begin <= time <= end
            ]
            ends = LABEL + room * (end - begin) / most
            colour = "#1f5fa8" if name.startswith("ours") else "#9aa5b1"
            lines.append(f'<text x="{LABEL - 8}" y="{base - 8}" text-anchor="end">{escape(f"{name}, {what}")}</text>')
            lines.append(f'<polygon points="{LABEL},{base} {" ".join(points)} {ends:.1f},{base}" fill="{colour}"/>')
            lines.append(f'<line x1="{LABEL}" y1="{base}" x2="{ends:.1f}" y2="{base}" stroke="#555"/>')
        for mark in (middle, end):
            x = LABEL + room * (mark - begin) / most
            lines.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{base}" stroke="#555" stroke-dasharray="4 3"/>')
        lines.append(f'<text x="{x:.1f}" y="{base + 14}" text-anchor="end">{(end - begin) * 1e3:.0f} ms</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _speeds(samples: Sequence[Sequence[float]], column: int) -> list[tuple[float, float]]:
    """Returns the times, and the rate a second of a count at each, over samples that span at least `BIN_S`."""
    kept = [samples[0]] if samples else []
    for sample in samples:
        if sample[0] - kept[-1][0] >= BIN_S:
            kept.append(sample)
    pairs = itertools.pairwise(kept)
    return [((a[0] + b[0]) / 2, (b[column] - a[column]) / (b[0] - a[0])) for a, b in pairs]
