"""What README.md and docs/ say of defaults, sizes and tolerances is what the code does, or what a test holds.

Other pages' statements have their tests beside what they are about: bytes a parameter in tests/zero/tools/test_plan.py, options
without effect in tests/zero/test_effects.py, errors in tests/test_errors.py, norms in tests/promises/test_clipping.py.
"""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zero
from tests.pasted import ROOT, blocks_of
from zero.plan.budget import default_bucket_bytes
from zero.plan.layout import FlatLayout, ParamSpec
from zero.setup.memory_guard import MemoryGuard

README = (ROOT / "README.md").read_text(encoding="utf-8")
MIB = 2**20


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def in_words(text):
    return " ".join(text.split())


def sizes(on_network, world=2):
    """The smallest and the largest bucket by default, and what part of the weights one has between these."""
    found = [default_bucket_bytes(2**power, world, on_network) for power in range(20, 45)]
    between = {2**power / size for power, size in zip(range(20, 45), found, strict=True) if found[0] < size < found[-1]}
    (part,) = between
    return found[0] / MIB, found[-1] / MIB, part


def test_the_sizes_of_buckets_that_pages_give_are_the_defaults():
    least, most, part = sizes(on_network=False)
    assert (least, most, part) == (16, 64, 64)
    assert default_bucket_bytes(2**20, 1, False, is_host=False) == 64 * MIB
    assert "`auto`: a 64th of the weights, 16 to 64 MiB, but 64 MiB for one rank on a device" in page("config")
    assert "The default is a 64th of the weights, 16 to 64 MiB." in in_words(page("scaling"))
    assert "two buckets, of 16 to 64 MiB each" in page("sharding")
    assert sizes(on_network=True) == (3, 16, 16)
    assert default_bucket_bytes(2**20, 32, True) == 32 * 256 * 2**10
    assert "and a 16th, 3 to 16 MiB, if host tensors go over a network" in page("config")
    assert "it is a 16th, at least 3 MiB and W x 256 KiB and at most 16 MiB." in in_words(page("scaling"))


def test_whole_weights_have_half_of_what_is_free_by_default():
    available = 10 * 2**30
    accelerator = SimpleNamespace(memory=lambda index: SimpleNamespace(available=available))
    place = SimpleNamespace(accelerator=accelerator, device=torch.device("cpu"), num_ranks=2, is_host=True)
    layout = FlatLayout.build([ParamSpec("weight", (2**20,), "float32")], 2, 2**20, 64)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    guard = MemoryGuard(place, optimizer, False, 2)
    states = guard._budget(layout, True)
    assert guard.room_for_weights("auto", layout, []) == (available / 2 - (states.peak - states.gathered)) / 2
    assert "or `auto`: half of what is free" in page("config")
    assert "without it, half of what is free beside the states" in page("from-fsdp")
    assert "by default up to half of the memory that is free beside the states" in in_words(page("sharding"))


def test_the_page_on_plans_gives_the_tolerance_of_the_tests():
    within = dict(re.findall(r"within (\d+) %(.*?)[,.]", in_words(page("plan"))))
    assert set(within) == {"5", "15"} and within["15"] == " for two ranks with homes on disk"
    homes = (ROOT / "tests" / "promises" / "test_homes_memory.py").read_text(encoding="utf-8")
    assert '<= (1.05 if world == 1 else 1.15) * each["plan"]' in homes
    shares = (ROOT / "tests" / "promises" / "test_sharded_weights_memory.py").read_text(encoding="utf-8")
    assert 'pytest.approx(row["peak"], rel=0.05)' in shares


def graphs_of(stage):
    """How many graphs two layers make, and whether one for all is refused."""
    torch._dynamo.reset()
    found, model = [], nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), 0.1), stage=stage)
    try:
        torch.compile(model, backend=lambda graph, inputs: found.append(graph) or graph)(torch.ones(2, 8)).sum().backward()
        try:
            torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 8))
        except (torch._dynamo.exc.TorchDynamoException, RuntimeError):
            return len(found), True
        return len(found), False
    finally:
        optimizer.discard()
        optimizer.close()
        torch._dynamo.reset()


def test_a_compiled_model_is_one_graph_below_stage_3_alone():
    assert graphs_of(0) == graphs_of(2) == (1, False)
    number, is_refused = graphs_of(3)
    assert number != 1 and is_refused
    said = "at stages 0 to 2. At stage 3 its graphs break where weights are gathered, and `fullgraph=True` fails."
    assert said in in_words(page("guide"))
    assert "with `torch.compile` graphs break there where weights are gathered" in page("from-fsdp")


def test_what_stands_for_fully_shard_is_stage_3():
    lines = [line for line in page("from-fsdp").splitlines() if "fully_shard(" in line and "zero." in line]
    lines += re.findall(r"# (?:instead of|for) fully_shard\(.*\n.*", README + page("from-fsdp"))
    assert len(lines) >= 3
    assert all("stage=3" in line for line in lines)


def test_a_window_is_defined_once():
    assert zero.__doc__ is not None
    for text in (zero.__doc__, page("glossary"), page("sharding")):
        (said,) = re.findall(r"^(?:window|\| \*\*window\*\* \||A window).*", text, re.MULTILINE)
        assert re.search(r"[Ff]rom one `?zero_grad`? to the next", said), said


def test_readme_says_which_extras_need_a_later_python():
    requirements = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    later = re.findall(r'^(\w+) = \["\1>=[^"]*; python_version >= \'([\d.]+)\'', requirements, re.MULTILINE)
    assert sorted(later) == [("transformers", "3.11"), ("trl", "3.11")]
    assert "transformers and TRL need Python 3.11;" in in_words(README)


def test_the_figures_of_readme_are_of_the_page_that_it_names():
    [said] = re.findall(r"On one H200 .*?PyTorch's", in_words(README))
    assert re.findall(r"\d\.\d+", said) == ["0.90", "1.53"]
    gpu = page("performance").partition("\n## One GPU\n")[2].partition("\n## ")[0]
    rows = {cells[0]: cells for line in gpu.splitlines() if (cells := [cell.strip() for cell in line.split("|")[1:-1]])}
    ours, theirs = (list(map(float, rows[name][2].split("–"))) for name in ("ours, stage 2", "FSDP2, a block a unit"))
    assert ours[0] <= 1.53 <= ours[1] and sum(ours) / sum(theirs) == pytest.approx(0.90, abs=0.005)


def test_every_table_of_figures_has_its_command_its_date_and_its_commit():
    *measured, gaps = re.split(r"\n## ", page("performance"))[1:]
    [long] = [part for part in re.split(r"\n## ", page("long-sequences")) if part.startswith("Measured\n")]
    assert len(measured) >= 10 and gaps.startswith("Known gaps\n")
    for section in (*measured, long):
        name, text = section.partition("\n")[::2]
        assert re.search(r"\b2026-\d\d-\d\d\b", text) and re.search(r"`[0-9a-f]{8}`", text), name
        commands = re.findall(r"python (benchmarks/\w+\.py)", text)
        assert commands and all((ROOT / command).exists() for command in commands), name
    for row in gaps.splitlines():
        if re.search(r"\| \d", row):  # a number, whose last cell says where it is from
            assert re.search(r"(`python benchmarks/\w+\.py[^`]*`|\]\([\w.-]*#[\w-]+\)|the same) +\|$", row), row


def test_the_page_of_figures_is_read_in_one_go():
    """Rules of tables are no words."""
    assert len(re.sub(r"\|[|-]*", " ", page("performance")).split()) <= 900


def test_no_page_says_that_several_gpus_have_run():
    assert "**Not yet run on several GPUs, ROCm, XPU or MPS**" in in_words(README)
    assert "they have run on CPUs and on one GPU, not on several." in in_words(page("large-models"))


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.stem)
def test_a_program_of_a_page_defines_what_it_uses(path):
    for language, name, code in blocks_of(path.read_text(encoding="utf-8")):
        if language == "python" and name:
            words = ["-m", "ruff", "check", "--isolated", "--select", "F821", "--stdin-filename", name, "-"]
            checked = subprocess.run([sys.executable, *words], input=code, capture_output=True, text=True, check=False)
            assert checked.returncode == 0, f"{path.name}, {name}: {checked.stdout}{checked.stderr}"


def test_the_site_is_searched_where_its_pages_are_files_and_there_is_no_network():
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.search(r"^  - offline\b", site, re.MULTILINE) and "use_directory_urls: false" in site
    # Otherwise the plugin `offline` fetches one.
    [script] = re.findall(r"^  polyfills: \[(.*iframe-worker.*)\]", site, re.MULTILINE)
    assert "window.Worker = " in (ROOT / "docs" / script).read_text(encoding="utf-8")
