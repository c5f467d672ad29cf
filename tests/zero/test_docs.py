"""Every command and every program in docs/ runs as printed, and what is drawn or listed there comes from the code.

A block with a name behind its language is a file. Other python blocks of a page run one after another, in one namespace; bash
blocks are commands, a line each; a text block is what those before it printed. By day commands run in the process of the tests
and models are compiled without inductor; at night whole pages are pasted into one process and one shell, with it.
"""

import ast
import contextlib
import importlib.util
import inspect
import io
import re
import shlex
import socket
import types
import typing

import pytest

import accelerators
import zero
from tests import programs
from tests.devices import needs_muon, needs_transformers
from tests.pasted import BLOCK, ROOT, Block, Prompt, blocks_of, paste
from tests.texts import defaults, texts
from zero.__main__ import main
from zero.config.deepspeed.keys import KNOWN

PAGES = sorted((ROOT / "docs").glob("*.md"))
WITH_BLOCKS = [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))]
# Pages whose commands start ranks or a launcher; by day tests/zero/tools, test_verify.py and tests/test_train.py run the same.
AT_NIGHT = {"plan", "train", "verify"}


def skip_what_is_missing(page):
    for used, needs in {"from transformers import": needs_transformers, "optim.Muon(": needs_muon}.items():
        if used in page.read_text(encoding="utf-8") and needs.args[0]:
            pytest.skip(needs.kwargs["reason"])


def script(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_command(line):
    words = shlex.split(line, comments=True)
    assert words[:3] == ["python", "-m", "zero"], f"no way to run this is known here: {line}"
    if "--ranks" in words:  # it starts processes that import the program that started them
        result = programs.python(*words[1:])
        assert result.returncode == 0, result.stdout + result.stderr
    else:
        assert main(words[3:]) == 0, line


@pytest.mark.parametrize("page", [page for page in WITH_BLOCKS if page.stem not in AT_NIGHT], ids=lambda page: page.stem)
def test_a_page_runs_as_printed(page, tmp_path, monkeypatch):
    skip_what_is_missing(page)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.setattr(accelerators.get("cpu"), "compile_backend", "aot_eager")  # inductor takes 15 s, at night
    namespace, printed = {"__name__": page.stem}, io.StringIO()
    for language, name, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        if name:
            (tmp_path / name).write_text(code, encoding="utf-8")
        elif language == "text":
            assert printed.getvalue() == code
            printed = io.StringIO()
        else:
            with contextlib.redirect_stdout(printed):
                if language == "python":
                    exec(compile(code, str(page), "exec"), namespace)
                else:
                    assert language == "bash", f"a block of {language} is neither run nor a file"
                    for line in code.splitlines():
                        run_command(line)
            printed = io.StringIO() if language == "bash" else printed


@pytest.mark.full
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.stem)
def test_a_page_runs_in_one_process_and_one_shell(page, tmp_path):
    skip_what_is_missing(page)
    for folder in ("docs", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    blocks = [block._replace(code=block.code.replace("29431", port)) for block in blocks_of(page.read_text(encoding="utf-8"))]
    _, *shown = paste([Block("bash", "", ". .venv/bin/activate"), *blocks], tmp_path)  # README has this line once
    printed, by = "", ""
    for (language, name, code), out in zip(blocks, shown, strict=True):
        if language == "text":
            assert printed == code
            printed = ""
        elif not name:
            printed, by = printed + out if by == language == "python" else out, language


@pytest.mark.parametrize("page", [*WITH_BLOCKS, ROOT / "README.md"], ids=lambda page: page.stem)
def test_a_block_of_python_can_be_pasted_at_a_prompt(page, monkeypatch):
    prompt = Prompt()
    monkeypatch.setattr(prompt, "runcode", lambda code: None)
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.language == "python" and not block.name:
            prompt.paste(block.code)


def test_every_fence_on_every_page_is_a_block_that_was_looked_at():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(BLOCK.findall(text)), page.name


def test_every_file_test_and_module_that_a_page_names_is_there():
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"`((?:accelerators|zero|ci|examples|docs|benchmarks|tests)/[\w/.-]*)`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
        for path, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", text):
            linked = page.parent / path if path else page
            assert linked.exists(), f"{page.name}: {path}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
                assert anchor in anchors, f"{page.name}: {path}#{anchor}"
        for name in re.findall(r"`(test_\w+)`", text):
            assert f"def {name}(" in tests, f"{page.name}: {name}"


def test_the_figures_are_those_of_the_plan():
    figures = script("figures")
    for name, draw in figures.FIGURES.items():
        assert (ROOT / "docs" / "figures" / name).read_text(encoding="utf-8") == draw(), f"run docs/figures.py: {name}"


def test_the_site_has_a_chapter_for_every_page_and_each_public_name():
    pages, settings = script("pages"), (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    chapters = re.findall(r"([\w/-]+\.md)$", settings.partition("\nnav:\n")[2], re.MULTILINE)
    assert sorted(chapters) == sorted([page.name for page in PAGES] + list(pages.generated()))
    reference = "".join(text for path, text in pages.generated().items() if path.startswith("reference/"))
    for package in (zero, accelerators):
        assert list(pages.public_names(package.__name__)) == sorted(package.__all__)
        for name, module in pages.public_names(package.__name__).items():
            assert reference.count(f"::: {module}.{name}\n") == 1, name
    assert pages.generated()["reference/shard.md"].startswith("# zero.shard and its optimizer\n")
    titles = [re.findall(r"^# (.*)$", text, re.MULTILINE)[0] for text in pages.generated().values()]
    titles += [re.findall(r"^# (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)[0] for page in PAGES]
    assert len(set(titles)) == len(titles)


PUBLIC = {f"{package.__name__}.{name}": getattr(package, name) for package in (zero, accelerators) for name in package.__all__}
METHODS = {
    f"{public.__name__}.{name}": value
    for public in (zero.ShardedOptimizer, zero.Engine, zero.MetricsWriter)
    for parent in public.__mro__
    for name, value in vars(parent).items()
    if parent.__module__.startswith("zero.") and not name.startswith("_") and inspect.isfunction(value)
}


@pytest.mark.parametrize("name", [name for name, public in PUBLIC.items() if inspect.isfunction(public) and "zero." in name])
def test_the_reference_explains_every_argument(name):
    explained = re.findall(r"^    \*{0,2}(\w+): ", (inspect.getdoc(PUBLIC[name]) or "").partition("Args:\n")[2], re.MULTILINE)
    arguments = list(inspect.signature(PUBLIC[name]).parameters)
    assert explained == arguments or (not explained and len(arguments) == 1), name


CLAUSES = {"What", "Whether", "Where", "How", "Of", "That", "As", "For", "In", "When", "Who", "If"}


def test_a_docstring_of_a_public_name_begins_with_a_verb_or_a_noun():
    """By the first word: clauses begin with these, as do sentences without a verb."""
    first = {name: (inspect.getdoc(public) or "").partition(" ")[0] for name, public in (PUBLIC | METHODS).items()}
    assert not {name: word for name, word in first.items() if not word or word in CLAUSES}


def test_a_name_in_a_table_breaks_behind_punctuation_and_a_wide_figure_scrolls():
    pages = script("pages")
    cell = "<td>the <code>gradient_clipping(a.b)</code></td><p><code>a_b</code></p>"
    expected = "<td>the <code>gradient_<wbr>clipping(<wbr>a.<wbr>b)</code></td><p><code>a_b</code></p>"
    assert pages.on_page_content(cell, None, None, None) == expected
    assert "wide" in pages.figure("", "figures/weight") and "wide" not in pages.figure("", "figures/bytes")


def test_tables_and_paragraphs_are_short():
    """Six columns fit a phone. A paragraph, or an entry of a list, is read in one go."""
    for page in (*PAGES, ROOT / "README.md"):
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for part in re.split(r"\n\s*\n|\n(?=- |\d+\. )", text):
            if part.startswith("|"):
                assert part.count(" | ", 0, part.find("\n")) < 6, f"{page.name}: {part[:80]}"
            elif not part.lstrip("\n").startswith("    "):
                assert len(part.split()) <= 75, f"{page.name}, {len(part.split())} words: {part[:80]}"


def test_on_the_site_a_page_that_is_named_is_a_link_and_a_file_has_its_name():
    page = types.SimpleNamespace(meta={}, file=types.SimpleNamespace(src_uri="index.md"))
    text = script("pages").on_page_markdown("see `docs/plan.md`\n```python a.py\nx = 1\n```\n", page, None, None)
    assert text == 'see [plan](plan.md)\n```python title="a.py"\nx = 1\n```\n'


def section(page, heading):
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


PAGE = (ROOT / "docs" / "from-deepspeed.md").read_text(encoding="utf-8")


def test_the_page_on_keys_lists_each_once_as_the_code_treats_it():
    page = (ROOT / "docs" / "deepspeed-keys.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
    assert set(listed) == KNOWN and len(listed) == len(KNOWN)


def test_the_page_on_deepspeed_says_of_every_call_whether_the_engine_has_it():
    rows = re.findall(r"^\| (`.*?`) +\| (same|different|absent) ", section(PAGE, "Engine calls"), re.MULTILINE)
    assert len(rows) > 30
    engine = {name for name in dir(zero.Engine) if not name.startswith("_")} | {"train", "eval"}  # these two the model has
    for names, answer in rows:
        for name in re.findall(r"`(\w+)`", names):
            assert (name in engine) == (answer != "absent"), name
    told = {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    methods = {name for name in engine if inspect.isfunction(getattr(zero.Engine, name, None))}
    calls = re.findall(r"^\| ([^|]*) \|", (ROOT / "docs" / "collectives.md").read_text(encoding="utf-8"), re.MULTILINE)
    own = {name for names in calls for name in re.findall(r"`(\w+)`", names)}
    counts_on = {zero.Engine.restart.__name__}  # loading calls it
    assert methods - told - own - counts_on == set(), "say what these are for somebody who comes from DeepSpeed"


def in_words(annotation):
    """The type of a setting, without None, which the default shows if it is allowed."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        return in_words(arguments[0])
    if typing.get_origin(annotation) is typing.Literal:
        return "dtype" if "bfloat16" in arguments else ", ".join(f"`{value}`" for value in arguments)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(in_words(each) for each in arguments if each is not type(None))
    if annotation in (bool, int, float):
        return annotation.__name__
    return "list" if typing.get_origin(annotation) is tuple else "block"


def test_the_page_on_configuration_explains_every_setting_with_its_type_and_default():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    explained = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page.partition("\n## Settings\n")[2], re.MULTILINE))
    assert sorted(explained) == sorted(zero.ZeroConfig.model_fields)
    values = dict(re.findall(r"^(\w+) = (.*)$", zero.ZeroConfig(stage=2).text().partition("\n[")[0], re.MULTILINE))
    blocks = {"stage": "required", "homes": "a block", "report": "a block"}
    for name, default in explained.items():
        assert default.strip("`") == (blocks.get(name) or values[name]), name
    shown = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*?) \|", page.partition("\n## Settings\n")[2], re.MULTILINE))
    assert shown == {name: in_words(field.annotation) for name, field in zero.ZeroConfig.model_fields.items()}


def test_texts_that_follow_from_the_code_are_up_to_date():
    """Tables of keys, what files and defaults mean, and the digests of these."""
    for path, text in texts().items():
        assert path.read_text(encoding="utf-8") == text, "python -m tests.texts; say in CHANGELOG.md which default changed"
    newest = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    for path, text in defaults().items():
        digest = re.search(r"^digest = (\w+)$", text, re.MULTILINE)[1]
        assert re.search(rf"`docs/defaults/{path.name}` +\| `{digest}`", newest), "the newest version has no digest of it"
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert newest.startswith(f"{version}\n")
    assert not re.search(r"^- .*\n +\S", newest, re.MULTILINE), "an entry is one line"


# Names of classes that the docs use in the sense that they have anywhere.
ORDINARY = {
    "asked", "away", "block", "budget", "cast", "code", "cost", "counts", "done", "loading", "place", "request", "round",
    "rows", "scaling", "settled", "streams", "sum", "sums", "tensor", "values", "version", "waiting", "weights",
}  # fmt: skip


def test_the_glossary_has_the_terms_that_other_pages_use_and_no_others():
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    defined = set(re.findall(r"^\| \*\*(.*?)\*\* \|", glossary, re.MULTILINE))
    others = [page for page in (*PAGES, ROOT / "README.md") if page.name != "glossary.md"]
    text = " ".join(page.read_text(encoding="utf-8").lower() for page in others)
    for term in defined:
        assert re.search(rf"\b{term.lower()}s?\b", text), f"{term} is defined and used nowhere"
    rooms = ("plan", "memory", "window", "sharding")
    files = (path for room in rooms for path in (ROOT / "zero" / room).rglob("*.py"))
    names = {name.lower() for path in files for name in re.findall(r"^class _?([A-Z][a-z]+)\b", path.read_text(), re.MULTILINE)}
    for name in names - ORDINARY:
        if len(re.findall(rf"\b{name}s?\b", text)) >= 3:
            assert {name, name.removesuffix("s")} & defined, f"{name} is used and not defined"


# Subjects that readers look for first, each with a page on which the site's search finds it in a title.
LOOKED_FOR = {
    "out of memory": "guide", "gradient accumulation": "guide", "mixed precision": "guide", "gradient clipping": "guide",
    "skipped steps": "guide", "torch.compile": "guide", "troubleshooting": "errors",
    "will it fit": "plan", "multi-node": "multi-node",
    "tensor parallelism": "parallelism", "offload": "offload", "transformers": "integrations",
    "numerical equivalence": "determinism",
    "which stage": "README", "install": "README", "sharded weights": "sharding",
    "memory by stage": "sharding", "hsdp": "multi-node",
    "compatibility": "maturity", "report a bug": "maturity", "license": "maturity", "fsdp": "from-fsdp", "ddp": "from-ddp",
    "mixture of experts": "parallelism", "save and load": "from-fsdp", "numbers that differ": "from-deepspeed",
    "choose a device": "accelerators", "metrics": "metrics", "bucket size": "scaling", "link speed": "scaling",
    "muon": "optimizers", "8-bit": "optimizers", "disk": "offload", "internals": "internals",
}  # fmt: skip


@pytest.mark.parametrize(("words", "name"), LOOKED_FOR.items())
def test_what_readers_look_for_is_in_a_title(words, name):
    path = ROOT / "README.md" if name == "README" else ROOT / "docs" / f"{name}.md"
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert any(words in title.lower() for title in titles), titles


def test_what_readers_look_for_is_found_by_its_words():
    """Terms that are no title, in the text of some page."""
    text = " ".join(" ".join(page.read_text(encoding="utf-8").lower().split()) for page in (*PAGES, ROOT / "README.md"))
    looked_for = (
        "activation checkpointing", "all-reduce", "reduce-scatter", "loss scale", "lora", "grad_norm", "find_unused_parameters",
        "learning rate schedule", "tensorboard", "hang", "checkpoint", "torchrun", "fullgraph",
    )  # fmt: skip
    assert [words for words in looked_for if words not in text] == []


def indented(text):
    """Yields the lines of code of a page or a docstring that stand in no fence."""
    for part in re.split(r"\n\s*\n", BLOCK.sub("", text)):
        if all(line.startswith("    ") for line in part.splitlines()):
            yield from (line[4:] for line in part.splitlines())


def test_code_fits_the_column_of_the_site():
    """Looks at all blocks but outputs, which are as they were printed."""
    for page in (*PAGES, ROOT / "README.md"):
        text = page.read_text(encoding="utf-8")
        blocks = "".join(block.code for block in blocks_of(text) if block.language != "text")
        for line in (*blocks.splitlines(), *indented(text)):
            assert len(line) <= 88, f"{page.name}: {line}"


def test_code_in_the_reference_fits_its_column():
    modules = [ROOT / f"{name.replace('.', '/')}.py" for name in script("pages").INTEGRATIONS]
    texts = {path.stem: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in modules if path.exists()}
    assert len(texts) >= 4
    texts |= {name: inspect.getdoc(public) for name, public in (PUBLIC | METHODS).items()}
    for name, text in texts.items():
        for line in indented(text or ""):
            assert len(line) <= 88, f"{name}: {line}"
