"""Scripts in their plain form and moved to `zero.shard`, and how many lines that changes."""

import difflib


def changed_lines(before: str, after: str) -> int:
    """Lines that were changed, added or deleted; one that took the place of another counts once."""
    blocks = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in blocks if kind != "equal")
