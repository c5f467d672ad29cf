"""Adds to the pages of this folder a first page, the changes, an API reference, links to pages by name, and each figure in
light and in dark, of which the switch of the site shows one."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INTEGRATIONS = (
    "zero.integrations.transformers", "zero.integrations.accelerate", "zero.integrations.lightning", "zero.integrations.vllm",
    "zero.compat.deepspeed",
    "accelerators.compat.deepspeed", "accelerators.testing.AcceleratorContract",
)  # fmt: skip
STREAMS = "accelerators.streams.Stream", "accelerators.streams.Event"


def public_names(package: str) -> dict[str, str]:
    """Each public name of a package with the module that defines it, read from the source."""
    for node in ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_HOME":
            return {name: f"{package}.{module}" for name, module in sorted(ast.literal_eval(node.value).items())}
    raise ValueError(f"Cannot list {package}: it has no _HOME. Write its public names there.")


def reference(package: str, further: tuple[str, ...] = (), options: str = "") -> str:
    blocks = [f"::: {module}.{name}\n" for name, module in public_names(package).items()]
    blocks += [f"::: {name}\n" for name in further]
    blocks = [block + options for block in blocks]
    return f"# {package}\n\n" + "\n\n".join(blocks) + "\n"


def generated() -> dict[str, str]:
    """Pages that are made of something else, by their path in the site."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    integrations = "\n\n".join(f"::: {name}" for name in INTEGRATIONS)
    return {
        "index.md": readme.replace("](docs/", "](").replace("](CHANGELOG.md)", "](changes.md)"),
        "changes.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "reference/zero.md": reference("zero"),
        "reference/accelerators.md": reference("accelerators", STREAMS, "    options:\n      show_if_no_docstring: true\n"),
        "reference/integrations.md": f"# Integrations\n\n{integrations}\n",
    }


def figures() -> dict[str, str]:
    """Returns each figure with light colours and with dark ones, whatever a reader prefers, by its path in the site."""
    found = {}
    for path in sorted((ROOT / "docs" / "figures").glob("*.svg")):
        for theme, style in (("light", ""), ("dark", r" \1")):
            text = re.sub(r" @media [^{]*\{(.*)\}(?=</style>)", style, path.read_text(encoding="utf-8"))
            found[f"figures/{path.stem}-{theme}.svg"] = text
    return found


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in (generated() | figures()).items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Any) -> str:
    """Gives a block of a file its name as a title, makes links of pages that are named, and shows figures in both themes."""
    text = re.sub(r"^```(\w+) (\S+)$", r'```\1 title="\2"', text, flags=re.MULTILINE)
    if page.file.src_uri.startswith("reference/"):
        return text
    text = re.sub(r"!\[(.*?)\]\((figures/\w+)\.svg\)", r"![\1](\2-light.svg#only-light)![\1](\2-dark.svg#only-dark)", text)
    return re.sub(r"(?<!\[)`docs/([\w-]+)\.md`", r"[\1](\1.md)", text)
