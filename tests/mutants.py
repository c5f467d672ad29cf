"""Faults put back into a copy of the library, to see that the suite finds them. At night and on request.

    python -m tests.mutants                   all of them; prints who was killed by what, and who survived
    python -m tests.mutants NAME...           those whose name contains one of the words
    python -m tests.mutants --points-only     without the tests
    python -m tests.mutants --tests PATH...   with other tests than TESTS
    python -m tests.mutants --folder PATH     go on where the run before in this folder ended

Those of tests.mutant_list are single faults of the kinds that sharded training is known for. Others are made mechanically,
over the modules of FLOORS. Each is tried on points of the parity grid over loopback first, as that is cheap; a survivor
meets the tests that run the function it is in until one fails, first those with its words in their names, and the quickest of
them. Before them the unchanged library meets all of that: it must survive, it is noted which tests run which functions
(tests/reach.py), and how long they take is the measure of who never ends.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import itertools
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests import mutant_list, reach
from tests.checkpoint_mutants import CHECKPOINTS
from tests.mutant_list import HARMLESS
from tests.reach import Reach
from tests.source_edits import ROOT, Drop, Mutant, Place, Replace, definitions, module_of, shortest_name, slots_below, the

NAMED = [*mutant_list.NAMED, *CHECKPOINTS]
SEED = 20260801
FLOORS = ("window", "runtime", "memory", "comm")
NUM_MECHANICAL = 66
NUM_POINTS = 160
TIMES_AS_LONG = 4.0  # relative to the unchanged library; ranks that take longer wait for each other, or never leave a loop
LEAST_S = 60.0
FEW_FIRST = (0, 40, 400)  # the numbers of tests that a mutant meets before the rest
# A rank that does not come is found out within the first limit. Under a load that may have been too short, so a mutant that
# fails at a point by its limit meets the point again with the second one.
LOOPBACK_LIMITS_S = (4.0, 20.0)
TESTS = ("tests/zero", "tests/promises", "tests/accelerators/test_examples.py")


# Made mechanically ------------------------------------------------------------------------------------------------------

_SWAPPED = {ast.Add: "-", ast.Sub: "+"}
_COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}


def mechanical(num: int = NUM_MECHANICAL, seed: int = SEED) -> list[Mutant]:
    """As many of all that can be made, the kinds in turn. Each is drawn by its name, so other definitions matter to none."""
    by_kind = {kind: list(mutants) for kind, mutants in _possible(seed).items()}
    chosen: list[Mutant] = []
    while len(chosen) < num and any(by_kind.values()):
        chosen += [by_kind[kind].pop() for kind in sorted(by_kind) if by_kind[kind]]
    return chosen[:num]


@functools.cache
def _possible(seed: int) -> dict[str, list[Mutant]]:
    by_kind: dict[str, list[Mutant]] = {}
    for path in sorted(path for floor in FLOORS for path in (ROOT / "zero" / floor).rglob("*.py")):
        for kind, mutant in _made_in(path):
            by_kind.setdefault(kind, []).append(mutant)
    for mutants in by_kind.values():
        mutants.sort(key=lambda mutant: hashlib.sha256(f"{seed} {mutant.name}".encode()).digest(), reverse=True)
    return by_kind


def _made_in(path: Path) -> Iterator[tuple[str, Mutant]]:
    for full_name, roots in definitions(path, ast.parse(path.read_text(encoding="utf-8"))).items():
        definition, counts = shortest_name(full_name), Counter[type[ast.AST]]()
        for slots in (slots for root in roots for slots in slots_below(root)):
            node = slots[-1].node
            place = the(type(node), n=counts[type(node)])
            for kind, edit in _made_of(node, place):
                yield kind, Mutant(f"{kind} in {definition}, {type(node).__name__} {counts[type(node)]}", definition, edit)
            counts[type(node)] += 1


def _made_of(node: ast.AST, place: Place) -> Iterator[tuple[str, Drop | Replace]]:
    if isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED and not _joins_text(node):
        yield "swap", Replace(place.op, _SWAPPED[type(node.op)])
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        yield "boundary", Replace(place.ops[0], _COMPARED[type(node.ops[0])])
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        text = ast.unparse(node)
        if not text.startswith("super()"):
            yield "wait" if re.search(r"\bwait(_\w+)?\(", text) else "call", Drop(place)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "off by one", Replace(place, str(node.value + 1))


def _joins_text(node: ast.BinOp) -> bool:
    """Text has no difference: such a mutant dies of a TypeError at once, and tells nothing of the tests."""
    kinds = (ast.JoinedStr, ast.List, ast.Tuple)
    values = (one for side in (node.left, node.right) for one in ast.walk(side))
    return any(isinstance(one, kinds) or isinstance(getattr(one, "value", None), (str, bytes)) for one in values)


# Trial ------------------------------------------------------------------------------------------------------------------


class Trial:
    """A process that has imported torch and nothing of `zero`, from which every mutant's process is forked."""

    def __init__(self, folder: Path, tests: Sequence[str], mutants: Sequence[Mutant]) -> None:
        self.folder = folder
        self._answers = folder / "answers of the oracle"
        self._tried = folder / "tried"
        # Run in a process of its own, as a process that has run a backward cannot be forked.
        if not self._answers.exists():
            self._checked("oracle", _in_child(self._ask_the_oracle, folder / "said", 600.0))
        self.points_most_s = 600.0
        home = self._home_of(None)
        started = time.monotonic()
        self._checked("points", self._meet_points(home))
        self.points_most_s = max(LEAST_S, TIMES_AS_LONG * (time.monotonic() - started))
        self._reach: Reach | None = None
        if tests:
            noted = folder / "noted"
            if not noted.exists():
                reach.watch(home, {mutant.path for mutant in mutants})
                noting = Path(tempfile.mkdtemp(dir=folder))
                self._checked("tests", self._meet_tests(home, tests, 3600.0, "-p", "tests.reach", REACH=str(noting)))
                noting.rename(noted)
            self._reach = Reach.read(noted)
        shutil.rmtree(home)

    def _checked(self, what: str, problem: str | None) -> None:
        if problem is not None:
            raise RuntimeError(f"The unchanged library fails ({what}): {problem}. There is nothing to compare mutants with.")

    def kill(self, mutant: Mutant) -> str | None:
        """By what it was killed, here or in the run before; None for a survivor."""
        before = dict(map(json.loads, self._tried.read_text(encoding="utf-8").splitlines())) if self._tried.exists() else {}
        if mutant.name in before:
            return before[mutant.name]
        by = self._killed(mutant)
        with self._tried.open("a", encoding="utf-8") as tried:
            print(json.dumps([mutant.name, by]), file=tried)
        return by

    def _killed(self, mutant: Mutant) -> str | None:
        home = self._home_of(mutant)
        try:
            trains = mutant not in CHECKPOINTS  # no point can tell a mutant of checkpoints
            found = self._meet_points(home) if trains else None
            if found is not None or self._reach is None:
                return found
            words = _words(f"{mutant.name} {mutant.full_name}")
            tests = self._reach.of(mutant.full_name, module_of(ROOT / mutant.path))
            common = Counter(word for test in tests for word in _words(test))
            # Tests with words in common with the mutant's name come first.
            tests.sort(key=lambda test: -sum(1 / common[word] for word in words & _words(test)))
            asked = home / "tests of it"
            for start, stop in itertools.pairwise((*FEW_FIRST, len(tests))):  # collecting thousands takes minutes
                asked.write_text("\n".join(tests[start:stop]), encoding="utf-8")
                most_s = max(LEAST_S, TIMES_AS_LONG * sum(map(self._reach.seconds.__getitem__, tests[start:stop])))
                found = self._meet_tests(home, [f"@{asked}"], most_s) if tests[start:stop] else None
                if found is not None:
                    return found
            return None
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def _home_of(self, mutant: Mutant | None) -> Path:
        home = Path(tempfile.mkdtemp(dir=self.folder)) / "tree"
        shutil.copytree(ROOT, home, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "trained", "build"))
        if mutant is not None:
            changed = home / mutant.path
            changed.write_text(mutant.applied(changed.read_text()))
        return home

    def _ask_the_oracle(self) -> str | None:
        from tests import parity

        answers = {}
        for point in _points():
            parity.expected(point)
            answers.update(parity._expected)
        self._answers.write_bytes(pickle.dumps(answers))
        return None

    def _meet_points(self, home: Path) -> str | None:
        return _in_child(lambda: self._fail_at_a_point(home), home / "said", self.points_most_s)

    def _fail_at_a_point(self, home: Path) -> str | None:
        sys.path.insert(0, str(home))
        from tests import parity

        assert str(home) in str(sys.modules["zero"].__file__), sys.modules["zero"].__file__
        parity._expected.update(pickle.loads(self._answers.read_bytes()))
        for point in _points():
            for parity.LOOPBACK_TIME_LIMIT_S in LOOPBACK_LIMITS_S:
                problem = parity.judge(point, parity.train_over_loopback(0, 1, [point], False)[0])
                if problem is None or "did not come to collective" not in problem:
                    break
            if problem is not None:
                return f"points: {point}: {problem.strip().splitlines()[-1][:200]}"
        return None

    def _meet_tests(self, home: Path, tests: Sequence[str], most_s: float, *options: str, **variables: str) -> str | None:
        path = os.pathsep.join([str(home), str(home / "simulated")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "300", **variables}
        # Runs all combinations of parameters that belong to the day.
        usual = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-m", "not full"]
        command = [sys.executable, "-m", "pytest", *usual, *options, *tests]
        try:
            result = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=most_s)
        except subprocess.TimeoutExpired:
            return "tests: they never ended"
        failed = re.search(r"^(?:FAILED|ERROR) (.*)", result.stdout, re.MULTILINE)
        if failed is not None:
            return f"tests: {failed[1][:300]}"
        return f"tests: exit status {result.returncode}: {result.stdout[-300:]}" if result.returncode else None


def _words(text: str) -> set[str]:
    """By their beginnings, so that forms of a word count as one."""
    return {word[:4] for word in re.findall("[a-z]{4,}", text.lower())}


def _points() -> list:
    """Several ranks, all cases, shuffled so that neighbours differ; the mutants meet them in this order."""
    from tests import grid
    from tests.zoo import CASES

    points = [
        p for p in grid.covering(("cpu",)) if p.world in (2, 3) and (p.bucket == "huge" or "many" not in CASES[p.case].tags)
    ]
    random.Random(SEED).shuffle(points)
    return points[:NUM_POINTS]


def _in_child(act: Callable[[], str | None], said: Path, most_s: float) -> str | None:
    """What `act` gave in a forked process; a sentence where that took too long or failed."""
    child = os.fork()
    if child == 0:
        try:
            text = act()
        except BaseException as error:  # noqa: BLE001 - a mutant may fail as it is imported
            text = f"points: {type(error).__name__}: {str(error)[:200]}"
        said.write_text(text or "")
        os._exit(0)
    deadline = time.monotonic() + most_s
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            text = said.read_text() if said.exists() else "points: its process died"
            said.unlink(missing_ok=True)
            return text or None
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "points: they never ended"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Puts faults back and looks who finds them.")
    parser.add_argument("names", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--points-only", action="store_true", help="leave out the tests that survivors of the points meet")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH", help="these tests instead of the usual ones")
    parser.add_argument("--folder", type=Path, metavar="PATH", help="keep what is noted and tried there, and go on from there")
    given = parser.parse_args(arguments)
    mutants = [*NAMED, *mechanical()]
    if given.names:
        mutants = [mutant for mutant in mutants if any(name in mutant.name for name in given.names)]
    import torch._dynamo  # noqa: F401 - what every mutant's process would import for seconds

    import tests.grid
    import tests.ranks  # noqa: F401

    assert not any(name.split(".")[0] == "zero" for name in sys.modules)
    killers: Counter[str] = Counter()
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as none_given:
        folder = given.folder or Path(none_given)
        folder.mkdir(parents=True, exist_ok=True)
        trial = Trial(folder, () if given.points_only else given.tests, [*NAMED, *mechanical()])
        for mutant in mutants:
            by = trial.kill(mutant)
            print(f"{'SURVIVED' if by is None else 'killed'}  {mutant.name}  {by or ''}", flush=True)
            survivors += [mutant.name] if by is None else []
            killers[(by or "nobody").partition(":")[0]] += 1
    unexplained = [name for name in survivors if name not in HARMLESS]
    print(f"{len(mutants)} tried, {dict(killers)}, {len(unexplained)} survivors without a reason")
    for name in survivors:
        print(f"    {name}: {HARMLESS.get(name, 'NO REASON GIVEN')}")
    dead = {mutant.name for mutant in mutants}.difference(survivors)
    possible = {mutant.name for mutant in (*NAMED, *mechanical(sys.maxsize))}
    for name in sorted(HARMLESS.keys() & dead | HARMLESS.keys() - possible):
        print(f"    {name}: has a reason why it survives, but it was killed, or cannot be made any more")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
