"""Bars as an SVG, drawn with nothing but text."""

from __future__ import annotations

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
