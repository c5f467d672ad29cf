"""The table of configuration keys in docs/from-deepspeed.md, out of what reads them. `python -m tests.texts` writes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from zero.config.deepspeed.keys import HARMLESS, REFUSED, USED

HEADS = (
    ("Used", "it sets", USED),
    ("Accepted without effect, with one line in the log", "why", HARMLESS),
    ("Refused where they ask for something", "why", REFUSED),
)


def _rows(keys: Mapping[str, str]) -> list[tuple[str, str]]:
    """Keys of one block that have one meaning together: `block.{a, b}`."""
    grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key, meaning in keys.items():
        block, _, name = key.rpartition(".")
        grouped[(block, meaning)].append(name)
    rows = []
    for (block, meaning), names in grouped.items():
        inside = names[0] if len(names) == 1 or not block else "{" + ", ".join(names) + "}"
        shown = [f"{block}.{inside}"] if block else names
        rows.append((", ".join(f"`{name}`" for name in shown), meaning))
    return rows


def table() -> str:
    parts = []
    for title, column, keys in HEADS:
        rows = [f"| {shown} | {f'`{meaning}`' if keys is USED else meaning} |" for shown, meaning in _rows(keys)]
        parts.append("\n".join([f"### {title}", "", f"| key | {column} |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"
