"""Every error of the library has one form: `Cannot X: Y. Do Z.`"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"ZeroError", "RanksDiffer", "RankFailed", "GroupLost", "NonFinite", "BadCheckpoint", "CheckpointFailed"}
PYTHONS_OWN = {"AttributeError", "AssertionError", "JSONDecodeError"}  # have the form that Python or its library gives them
FORM = re.compile(r"Cannot .*?(?:[.:] .*|\{.*)", re.DOTALL)
REMEDY = re.compile(r".*([.?!)] [A-Z{].*[.?}]|\{[^{}]*\})", re.DOTALL)
# Reasons that another error tells as its Y; what the simulated device says in torch's words; and a race, which is a report.
OTHERS = (
    "its factory gave", "unavailable_reason gave", "device_count gave", "{} gave", "its group was destroyed",
    "its header is longer", "{} has dtype",
    "a tensor is not as long", "rank {} had not written", "rank {} could not write", "the memory of process", "only Linux has",
    "the ranks were connected again", "process {} has", "an exception broke off", "nothing came from rank",
    "torch.distributed was ended", "it failed on its device",
    "Expected all tensors to be on the same device", "SIM out of memory", "Timed out: ", "{} bytes {} to {}", "New memory on",
)  # fmt: skip


def text_of(node: ast.expr) -> str | None:
    """A message with {} for what is filled in; None where it is made elsewhere."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return "".join(text_of(side) or "{}" for side in (node.left, node.right))
    return None


PACKAGES = ("accelerators", "simulated", "zero")


def messages(package: str) -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            text = text_of(node.args[0])
            if text is not None and (name in OURS or name.endswith("Error")) and name not in PYTHONS_OWN:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def test_the_form_is_told_from_others():
    good = "Cannot step: it was closed. Shard again."
    assert FORM.fullmatch(good) and REMEDY.fullmatch(good)
    assert not FORM.fullmatch("The optimizer is closed, no step is possible.")
    assert not REMEDY.fullmatch("Cannot step: it was closed.")


@pytest.mark.parametrize(("package", "least"), [("accelerators", 40), ("simulated", 10), ("zero", 40)])
def test_every_error_says_what_cannot_be_done_why_and_what_to_do(package, least):
    found = [(place, text) for place, text in messages(package) if not text.startswith(OTHERS)]
    assert len(found) > least
    wrong = [f"{place}: {text}" for place, text in found if not (FORM.fullmatch(text) or text.startswith("{}"))]
    without = [f"{place}: {text}" for place, text in found if not REMEDY.fullmatch(text)]
    assert not wrong and not without, "\n".join(["not of the form:", *wrong, "without a remedy:", *without])


def test_each_error_of_the_page_is_one_of_the_library():
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `Cannot")]
    assert len(rows) >= 30
    texts = [text for package in PACKAGES for _, text in messages(package)]
    known = [(head, text) for text in texts if len(head := text.partition("{}")[0]) > len("Cannot ")]
    for row in rows:
        first, *others = re.findall(r"`([^`]*)`", row)
        fitting = [text for head, text in known if head.startswith(first) or first.startswith(head)]
        assert any(all(other in text for other in others) for text in fitting), row
