"""Scripts in their plain form and moved to this library, and how many lines that changes."""

from __future__ import annotations

import difflib
from pathlib import Path

HERE = Path(__file__).parent
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
        plain, moved = (Path(HERE, form, f"{kind}.py").read_text(encoding="utf-8") for form in ("plain", "sharded"))
        rows.append(f"| {library} | {what} | {num_lines(plain)} | {changed_lines(plain, moved)} |")
    return "\n".join(rows) + "\n"
