"""Pastes the blocks of a page, in their order, into one Python process and one shell, as somebody who reads it does.

A block with a name behind its language is a file, which is saved. Blocks of other languages than python and bash are left out.
Python gets lines as at its prompt, where an empty one ends what is indented.
"""

import code
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    name: str
    code: str


def blocks_of(page: str) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page)]


def without_choices() -> dict[str, str]:
    """The environment of somebody who has chosen no accelerator, rank or port, and has activated nothing."""
    ours = re.compile(r".*ACCELERATOR|ACCELERATOR_MEMORY|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|VIRTUAL_ENV")
    found = {key: value for key, value in os.environ.items() if not ours.fullmatch(key)}
    path = [folder for folder in found["PATH"].split(os.pathsep) if not Path(folder).is_relative_to(sys.prefix)]
    return {**found, "PATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


def paste(blocks: list[Block], folder: Path, **variables: str) -> list[str]:
    """What each block printed. In `folder/.venv` is the environment of these tests, and `variables` are set in the shell beside
    what a reader has; what fails is an AssertionError."""
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "blocks.json").write_text(json.dumps(blocks), encoding="utf-8")
    environment = {**without_choices(), "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= variables
    command = [sys.executable, "-m", "tests.pasted", "blocks.json", "printed.json"]
    # No pipe is used, as a process that outlives the limit would keep it open. The limit is for programs that hang, since
    # compiling may take minutes.
    with (folder / "pasted.log").open("w+", encoding="utf-8") as log:
        ended = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=1800)
        log.seek(0)
        assert ended.returncode == 0, log.read()
    return json.loads((folder / "printed.json").read_text(encoding="utf-8"))


class Prompt(code.InteractiveConsole):
    """Python's prompt, but that the first error ends the process."""

    def paste(self, block: str) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            for line in [*block.splitlines(), ""]:
                more = self.push(line)
        if more:
            raise SyntaxError(f"The prompt waits for the rest of this:\n{block}")
        return printed.getvalue()

    def showsyntaxerror(self, *_args, **_kwargs):
        raise

    def showtraceback(self):
        raise


class Shell:
    """A shell that the first command that fails ends."""

    END = "-- pasted --"

    def __init__(self):
        self._process = subprocess.Popen(["bash", "-e"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def paste(self, block: str) -> str:
        self._process.stdin.write(f"{block}\necho '{self.END}'\n")
        self._process.stdin.flush()
        printed = []
        for line in self._process.stdout:
            if line.rstrip("\n") == self.END:
                return "".join(printed)
            printed.append(line)
        raise RuntimeError("".join([*printed, f"The shell ended with status {self._process.wait()}."]))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def main(blocks: str, printed: str) -> None:
    sys.displayhook = lambda value: None  # the prompt's answers are not on the page
    prompt, shell = Prompt({"__name__": "__main__"}), Shell()
    into = {"python": prompt.paste, "bash": shell.paste}
    shown = []
    for language, name, text in json.loads(Path(blocks).read_text(encoding="utf-8")):
        print(f"-- {language} {name}\n{text}", flush=True)
        if name:
            Path(name).write_text(text, encoding="utf-8")
        shown.append("" if name or language not in into else into[language](text))
        print(shown[-1], flush=True)
    shell.close()
    Path(printed).write_text(json.dumps(shown), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
