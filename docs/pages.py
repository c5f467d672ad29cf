"""Adds to the pages of this folder a first page, the changes, an API reference, links to pages by name, and each figure in
light and in dark, of which the switch of the site shows one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INTEGRATIONS = (
    "zero.integrations.transformers", "zero.integrations.accelerate", "zero.integrations.lightning", "zero.integrations.vllm",
    "zero.compat.deepspeed",
    "accelerators.compat.deepspeed", "accelerators.testing.AcceleratorContract",
)  # fmt: skip
STREAMS = "accelerators.streams.Stream", "accelerators.streams.Event"
OF_ACCELERATORS = ("current", "use", "using", "get", "of", "candidates", "register", "Accelerator", "MemoryReading")
# Pages on `zero`, each with a sentence, and its names in the order in which a reader looks for them.
OF_ZERO = {
    "shard": (
        "zero.shard and its optimizer", "Wrap an optimizer, and what the one that you get can do.",
        ("shard", "ShardedOptimizer", "ZeroConfig"),
    ),
    "checkpoints": (
        "Checkpoints and weights", "Save, resume, read weights of other programs, and write weights for them.",
        ("save", "load", "latest", "load_weights", "export", "read_export"),
    ),
    "parallel": (
        "Parts and long sequences", "Experts, tensor parallelism, and sequences that do not fit a device.",
        ("part", "ulysses", "sequence_batch", "linear_cross_entropy", "in_chunks", "activations_on_host"),
    ),
    "tools": (
        "Compile, verify, metrics, errors", "Compile a model, compare a training with plain PyTorch, and record it.",
        ("compile", "as_regions", "verify", "MetricsWriter", "ZeroError"),
    ),
    "engine": ("zero.initialize and its engine", "The interface of DeepSpeed.", ("initialize", "Engine")),
}  # fmt: skip

# docs/config.md explains the fields of this one.
MEMBERS = {"ZeroConfig": "\n    options:\n      members: [as_dict, digest, lines, text]"}
# Pages that the search ranks above others, or below.
BOOSTS = {"guide.md": 3, "errors.md": 2, "sharding.md": 2, "config.md": 4, "from-fsdp.md": 2, "from-deepspeed.md": 2,
          "from-ddp.md": 2, "deepspeed-keys.md": 0.3, "performance.md": 0.5, "reference/engine.md": 0.5,
          "reference/integrations.md": 0.3, "internals.md": 0.5}  # fmt: skip
WIDE = 400  # pixels; wider figures are scrolled on narrow screens


def public_names(package: str) -> dict[str, str]:
    """Each public name of a package with the module that defines it, read from the source."""
    for node in ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_HOME":
            return {name: f"{package}.{module}" for name, module in sorted(ast.literal_eval(node.value).items())}
    raise ValueError(f"Cannot list {package}: it has no _HOME. Write its public names there.")


def reference(title: str, said: str, names: Iterable[str], options: str = "") -> str:
    """Returns a page with a heading for each object, by its full name."""
    return f"# {title}\n\n{said}\n\n" + "\n\n".join(f"::: {name}\n{options}" for name in names) + "\n"


def generated() -> dict[str, str]:
    """Pages that are made of something else, by their path in the site."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    zero, accelerators = public_names("zero"), public_names("accelerators")
    pages = {
        f"reference/{page}.md": reference(title, said, (f"{zero[name]}.{name}{MEMBERS.get(name, '')}" for name in names))
        for page, (title, said, names) in OF_ZERO.items()
    }
    devices = [*(f"{accelerators[name]}.{name}" for name in OF_ACCELERATORS), *STREAMS]
    shown = "    options:\n      show_if_no_docstring: true\n"
    return {
        "index.md": readme.replace("](docs/", "](").replace("](CHANGELOG.md)", "](changes.md)"),
        "changes.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        **pages,
        "reference/accelerators.md": reference("accelerators", "Choose a device, and ask it.", devices, shown),
        "reference/integrations.md": reference("Integrations", "Classes for other libraries.", INTEGRATIONS),
    }


def figures() -> dict[str, str]:
    """Returns each figure with light colours and with dark ones, whatever a reader prefers, by its path in the site."""
    found = {}
    for path in sorted((ROOT / "docs" / "figures").glob("*.svg")):
        for theme, style in (("light", ""), ("dark", r" \1")):
            text = re.sub(r" @media [^{]*\{(.*)\}(?=</style>)", style, path.read_text(encoding="utf-8"))
            found[f"figures/{path.stem}-{theme}.svg"] = text
    return found


def on_config(config: Any) -> Any:
    """Puts the version and the licence below every page."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version, licence = (re.findall(rf'^{key} = "(.*)"$', text, re.MULTILINE)[0] for key in ("version", "license"))
    config["copyright"] = f"Version {version}. {licence}."
    return config


def figure(words: str, path: str) -> str:
    """Returns both forms of a figure, of which the theme shows one."""
    width = int(re.findall(r'width="(\d+)"', (ROOT / "docs" / f"{path}.svg").read_text(encoding="utf-8"))[0])
    kind = "{ .wide }" if width > WIDE else ""
    return "".join(f"![{words}]({path}-{theme}.svg#only-{theme}){kind}" for theme in ("light", "dark"))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Lets names in tables break behind punctuation and before a capital, and nowhere else."""
    def breakable(cell: re.Match[str]) -> str:
        place = r"(?<=[._,/(=])(?=[^\W_])|(?<==)(?=&quot;|\")|(?<=[a-z])(?=[A-Z])"
        return re.sub(r"(?<=<code>)[^<]*", lambda name: re.sub(place, "<wbr>", name[0]), cell[0])

    return re.sub(r"<td.*?</td>", breakable, html, flags=re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in (generated() | figures()).items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Any) -> str:
    """Gives a block of a file its name as a title, makes links of pages that are named, and shows figures in both themes."""
    page.meta["search"] = {"boost": BOOSTS.get(page.file.src_uri, 1)}
    text = re.sub(r"^```(\w+) (\S+)$", r'```\1 title="\2"', text, flags=re.MULTILINE)
    if page.file.src_uri.startswith("reference/"):
        return text
    text = re.sub(r"!\[(.*?)\]\((figures/\w+)\.svg\)", lambda found: figure(found[1], found[2]), text)
    return re.sub(r"(?<!\[)`docs/([\w-]+)\.md`", r"[\1](\1.md)", text)
