"""Draws plots as SVG text: a line or a layer is one `path`. Nothing has to be installed to draw or to see them."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 760, 260
LEFT, RIGHT, TOP, BOTTOM = 74, 150, 14, 34
COLORS = ("#3366aa", "#cc7733", "#338855", "#aa3355", "#7755aa", "#887733", "#228899", "#666666")

Numbers = Sequence[float]


@dataclass(frozen=True)
class Frame:
    """Maps numbers to places in the drawing."""

    first: float
    last: float
    bottom: float
    top: float

    @staticmethod
    def around(xs: Numbers, ys: Numbers, from_zero: bool) -> Frame:
        ys = [y for y in ys if math.isfinite(y)] or [0.0]
        low, high = (0.0 if from_zero else min(ys)), max(ys)
        if high <= low:
            high = low + (abs(low) or 1.0)
        return Frame(xs[0], xs[-1] if xs[-1] > xs[0] else xs[0] + 1, low, high)

    def x(self, value: float) -> float:
        return LEFT + (value - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.bottom) / (self.top - self.bottom) * (HEIGHT - TOP - BOTTOM)

    def path(self, xs: Numbers, ys: Numbers) -> str:
        places = (f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in zip(xs, ys, strict=True) if math.isfinite(y))
        return "M" + " L".join(places)


def lines(
    xs: Numbers, series: Mapping[str, Numbers], tell: Callable[[float], str], from_zero: bool = False, unit: float = 1.0
) -> str:
    """Draws a line for each of `series` over `xs`; the axis has round multiples of `unit`, in the words of `tell`."""
    frame = Frame.around(xs, [value for values in series.values() for value in values], from_zero)
    drawn = [f'<path d="{frame.path(xs, ys)}" fill="none" stroke="{color}" stroke-width="1.6"/>'
             for ys, color in zip(series.values(), _colors(series), strict=True)]  # fmt: skip
    return _drawing(frame, drawn, series, tell, unit)


def layers(xs: Numbers, series: Mapping[str, Numbers], tell: Callable[[float], str]) -> str:
    """Draws a layer for each of `series` over `xs`, one upon the other."""
    floor, drawn, tops = [0.0] * len(xs), [], []
    for ys in series.values():
        tops.append((floor, [below + y for below, y in zip(floor, ys, strict=True)]))
        floor = tops[-1][1]
    frame = Frame.around(xs, floor, from_zero=True)
    for (below, above), color in zip(tops, _colors(series), strict=True):
        back = frame.path(xs[::-1], below[::-1]).replace("M", "L", 1)
        drawn.append(f'<path d="{frame.path(xs, above)} {back} Z" fill="{color}" fill-opacity="0.75"/>')
    return _drawing(frame, drawn, series, tell)


def _colors(series: Mapping[str, Numbers]) -> list[str]:
    return [COLORS[index % len(COLORS)] for index in range(len(series))]


def _drawing(
    frame: Frame, drawn: Sequence[str], series: Mapping[str, Numbers], tell: Callable[[float], str], unit: float = 1.0
) -> str:
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">']
    for value in ticks(frame.bottom, frame.top, unit=unit):
        y = frame.y(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{html.escape(tell(value))}</text>')
    for value in ticks(frame.first, frame.last):
        parts.append(f'<text x="{frame.x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    parts += drawn
    for index, (name, color) in enumerate(zip(series, _colors(series), strict=True)):
        y = TOP + 8 + 18 * index
        parts.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{y - 8}" width="11" height="11" fill="{color}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 31}" y="{y + 2}">{html.escape(name)}</text>')
    return "\n".join([*parts, "</svg>"])


def ticks(low: float, high: float, about: int = 5, unit: float = 1.0) -> list[float]:
    """Returns about as many round multiples of `unit` between two numbers."""
    if unit != 1.0:
        return [value * unit for value in ticks(low / unit, high / unit, about)]
    step = 10.0 ** math.floor(math.log10((high - low) / about))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= about)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]
