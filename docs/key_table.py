"""The tables of docs/deepspeed-keys.md, a key a row, out of what reads them. `python -m tests.texts` writes it."""

from __future__ import annotations

from zero.config.deepspeed.keys import HARMLESS, REFUSED, USED

HEADS = (
    ("Used", "it sets", USED),
    ("Accepted without effect, with one line in the log", "why", HARMLESS),
    ("Refused if they ask for something", "why", REFUSED),
)


def table() -> str:
    parts = []
    for title, column, keys in HEADS:
        rows = [f"| `{key}` | {f'`{keys[key]}`' if keys is USED else keys[key]} |" for key in sorted(keys)]
        parts.append("\n".join([f"## {title}", "", f"| key | {column} |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"
