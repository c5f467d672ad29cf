"""Scripts in their plain form and moved to this library, and how many lines that changes.

`plain` has the scripts, and `changes` what `diff -U0` says of each and of the same after it was moved by the docs.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HUNK = re.compile(r"^@@ -(\d+),?(\d*) .*\n((?:[-+].*\n)*)", re.MULTILINE)
# What each is, and which library it comes from.
KINDS = {
    "classifier": ("DDP", "an image classifier with BatchNorm, evaluated and saved on rank 0"),
    "gan": ("DDP", "a GAN, with two optimizers"),
    "language_model": ("DDP", "a language model with `no_sync`, GradScaler and clipping"),
    "fine_tuning": ("DDP", "fine-tuning of adapters, with groups of decay"),
    "averaged": ("DDP", "an averaged copy of the model, as timm keeps it"),
    "reinforcement": ("DDP", "actor, critic and temperature, three optimizers and a target network"),
    "round_trip": ("FSDP2", "checkpoints of `torch.distributed.checkpoint`, saved and loaded"),
    "features": ("accelerate", "accumulation, schedule, metrics, `save_state` and `load_state`"),
    "best": ("Lightning", "a fit that keeps its best checkpoint and loads it"),
}


def script(kind: str, is_moved: bool) -> str:
    """One of them, before or after."""
    lines = Path(HERE, "plain", f"{kind}.py").read_text(encoding="utf-8").splitlines(keepends=True)
    changes = Path(HERE, "changes", f"{kind}.diff").read_text(encoding="utf-8") if is_moved else ""
    for first, num, changed in reversed(HUNK.findall(changes)):
        start = int(first) - (num != "0")  # nothing is deleted: behind that line
        gone, come = ([line[1:] for line in changed.splitlines(keepends=True) if line[0] == sign] for sign in "-+")
        assert lines[start : start + len(gone)] == gone, f"{kind}.diff changes {gone}, which is not in the plain script"
        lines[start : start + len(gone)] = come
    return "".join(lines)


def train(kind: str, is_moved: bool, stage: int) -> list[float]:
    """Its losses on this rank."""
    module: dict[str, Any] = {"__name__": f"{kind}_{'moved' if is_moved else 'plain'}"}
    exec(compile(script(kind, is_moved), f"{module['__name__']}.py", "exec"), module)
    return list(module["train"](stage))


def changed_lines(before: str, after: str) -> int:
    """Lines that were changed, added or deleted; one that took the place of another counts once."""
    blocks = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in blocks if kind != "equal")


def num_lines(script: str) -> int:
    """Lines that are not empty."""
    return sum(1 for line in script.splitlines() if line.strip())


def table() -> str:
    """The table of docs/from-ddp.md."""
    rows = ["| from | script | lines | of which change |", "|---|---|---|---|"]
    for kind, (library, what) in KINDS.items():
        plain, moved = (script(kind, is_moved) for is_moved in (False, True))
        rows.append(f"| {library} | {what} | {num_lines(plain)} | {changed_lines(plain, moved)} |")
    return "\n".join(rows) + "\n"
