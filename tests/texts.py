"""Writes the texts that follow from the code: what configurations mean and their digests, the table of DeepSpeed's keys, and
that of lines that change in scripts that are moved.

    python -m tests.texts

Tests compare them. Where a default has changed, say so in CHANGELOG.md too.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path

import zero
from tests import moved
from tests.zero.test_deepspeed_json import FILES, golden
from zero.__main__ import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def defaults() -> dict[Path, str]:
    """What a configuration means that says nothing but the stage."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["config", str(DOCS / "defaults" / "initialize.json")])
    folder = DOCS / "defaults"
    return {folder / "initialize.txt": out.getvalue(), folder / "shard.txt": zero.ZeroConfig(stage=2).text()}


def with_digests(changelog: str) -> str:
    """The page with the digest of each text of defaults in its newest table."""
    for path, text in defaults().items():
        digest = re.search(r"^digest = (\w+)$", text, re.MULTILINE)
        assert digest is not None
        row = rf"(`docs/defaults/{path.name}` +\| `)\w+(?=`)"
        changelog = re.sub(row, lambda found, digest=digest: found[1] + digest[1], changelog, count=1)
    return changelog


def with_table(page: str, table: str) -> str:
    """The page with this table after the comment that names this program."""
    before, comment, after = page.partition("<!-- python -m tests.texts -->\n")
    _, heading, rest = after.partition("\n## ")
    return f"{before}{comment}\n{table}{heading}{rest}"


def with_key_table(page: str) -> str:
    """The page with the table of DeepSpeed's keys."""
    before, comment, _ = page.partition("<!-- python -m tests.texts -->\n")
    return f"{before}{comment}\n{runpy.run_path(str(DOCS / 'key_table.py'))['table']()}"


def with_moved_scripts(page: str) -> str:
    """The page with the number of lines that each script of tests/moved changes."""
    return with_table(page, moved.table())


def texts() -> dict[Path, str]:
    """Each text by the file that has it."""
    pages = {ROOT / "CHANGELOG.md": with_digests, DOCS / "deepspeed-keys.md": with_key_table,
             DOCS / "from-ddp.md": with_moved_scripts}  # fmt: skip
    written = {path: write(path.read_text(encoding="utf-8")) for path, write in pages.items()}
    return {**written, **defaults(), **{path.with_suffix(".txt"): golden(path) for path in FILES}}


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
