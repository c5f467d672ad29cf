"""Faults put back into a copy of the library, to see that the suite finds them. On request only, not in CI.

    python -m tests.mutants                   all of them; prints who was killed by what, and who survived
    python -m tests.mutants NAME...           those whose name contains one of the words
    python -m tests.mutants --workers 2       two at a time

NAMED are one-line faults of the kinds that sharded training is known for. The others are made mechanically, with a fixed seed,
over the floors runtime, memory and comm. Each is tried on points of the parity grid over loopback first, as that is cheap, and
whoever gets through meets the tests of its floor and the promises. A survivor belongs into HARMLESS with the reason why it
changes nothing, or it shows a test that is missing. tests/test_mutants.py sees to it that what NAMED replaces is still there.
"""

from __future__ import annotations

import argparse
import ast
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
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEED = 20260801
NUM_MECHANICAL = 40
MOST_S = 150.0  # for one mutant and the points; a fault may make ranks wait for each other for ever
TESTS_MOST_S = 400.0
NUM_POINTS = 160
# What meets a mutant that the points do not kill.
TESTS = (
    "tests/zero/plan", "tests/zero/runtime", "tests/zero/memory", "tests/zero/comm", "tests/zero/test_state_of_frozen.py",
    "tests/zero/test_front_door.py", "tests/zero/test_engine.py", "tests/test_random_training.py", "tests/promises",
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    name: str
    path: str
    before: str
    after: str
    at: int | None = None  # where in the file, of those that are made mechanically

    def applied(self, source: str) -> str:
        if self.at is not None:
            return source[: self.at] + self.after + source[self.at + len(self.before) :]
        if source.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.path} has {source.count(self.before)} places with {self.before!r}, not one.")
        return source.replace(self.before, self.after)


R, M, C, P = "zero/runtime/", "zero/memory/", "zero/comm/", "zero/plan/"

NAMED = [
    Mutant(
        "drop the last backward",
        R + "reducer.py",
        "while any(index in self.order for index in self._rounds):",
        "while self.sent < len(self.order) and any(index in self.order for index in self._rounds):",
    ),
    Mutant(
        "drop what is late",
        R + "agreement.py",
        "rest = wide | _union([counts.later | _left_open(counts, rounds, order) for counts in everyone])",
        "rest = wide | _union([counts.later for counts in everyone])",
    ),
    Mutant(
        "send late what only rank 0 has",
        R + "agreement.py",
        "rest = wide | _union([counts.later | _left_open(counts, rounds, order) for counts in everyone])",
        "rest = wide | counts_of_0.later | _left_open(counts_of_0, rounds, order) if (counts_of_0 := everyone[0]) else 0",
    ),
    Mutant(
        "divide twice",
        R + "window.py",
        "if not self.since.settled or agreement.discard:\n"
        "                self.shares.shard.multiply(self.scaling.at_settling(agreement.weight))",
        "if True:\n"
        "                self.shares.shard.multiply(self.scaling.at_settling(agreement.weight) * self.scaling.reduce)",
    ),
    Mutant(
        "divide never",
        P + "scaling.py",
        "return self.reduce / self.loss_scale",
        "return 1.0 / self.loss_scale",
    ),
    Mutant(
        "factor applied at keeping and at settling",
        P + "scaling.py",
        "return self._whole if settled else self._exact",
        "return self._whole",
    ),
    Mutant(
        "factor of a settled window forgotten",
        P + "scaling.py",
        "return self._whole if settled else self._exact",
        "return self._exact",
    ),
    Mutant(
        "settled again, multiplied again",
        R + "window.py",
        "if not self.since.settled or agreement.discard:\n",
        "if True:\n",
    ),
    Mutant(
        "reduce at the first hook only",
        R + "window.py",
        "        self.reducer.advance()\n",
        "        if not self.reducer.sent:\n"
        "            self.reducer.advance()\n"
        "        else:\n"
        "            self.reducer._rounds.pop(next(iter(self.reducer._rounds), -1), None)\n",
    ),
    Mutant(
        "order by arrival",
        R + "reducer.py",
        "        index = self.order[self.sent % len(self.order)]\n        self.sent += 1\n",
        "        index = next(iter(self._rounds), self.order[self.sent % len(self.order)])\n        self.sent += 1\n",
    ),
    Mutant(
        "everybody follows his own order",
        R + "reducer.py",
        "first = [index for index in agreement.order if index in reached]",
        "first = [index for index in self._arrived if index in reached]",
    ),
    Mutant(
        "fill missing gradients with zeros",
        R + "window.py",
        "self.used = self.used & ~agreement.removed | agreement.used",
        "self.used = self.params.all",
    ),
    Mutant(
        "used is what this rank used",
        R + "window.py",
        "self.used = self.used & ~agreement.removed | agreement.used",
        "self.used = self.used & ~agreement.removed | used_here",
    ),
    Mutant(
        "what was used stays used",
        R + "window.py",
        "self.used = self.used & ~agreement.removed | agreement.used",
        "self.used = self.used | agreement.used",
    ),
    Mutant(
        "gaps of a bucket are sent as they are",
        R + "reducer.py",
        "            for gap in gaps:\n                buffer[gap.start : gap.stop].zero_()",
        "            pass",
    ),
    Mutant(
        "absent parameters are sent as they are",
        R + "reducer.py",
        "                        if at == index:\n                            round_.buffer",
        "                        if at == -1:\n                            round_.buffer",
    ),
    Mutant(
        "a round of nothing is sent as it is",
        R + "reducer.py",
        "return self._staging.borrow(bucket.span.numel, self.line.dtype_of(index)).zero_()",
        "return self._staging.borrow(bucket.span.numel, self.line.dtype_of(index))",
    ),
    Mutant(
        "check only the first tensor for inf",
        R + "shares.py",
        "square = sum(norm * norm for norm in _norms(self.shard.present()))",
        "square = sum(norm * norm for norm in _norms(self.shard.present()[:1]))",
    ),
    Mutant(
        "the norm of one rank's share only",
        R + "shares.py",
        "        if self._sharded:\n            square = sum(",
        "        if False:\n            square = sum(",
    ),
    Mutant(
        "each rank judges for itself",
        R + "shares.py",
        'square = sum(numbers[0] for numbers in self.exchange_numbers([square], "the norm of all gradients"))',
        'square = self.exchange_numbers([square], "the norm of all gradients")[self._rank][0]',
    ),
    Mutant(
        "norms are remembered over a change",
        R + "shares.py",
        "**{name: self._cut(value, piece) for name, value in keywords.items()})\n        self.forget_norms(param)",
        "**{name: self._cut(value, piece) for name, value in keywords.items()})",
    ),
    Mutant(
        "norms are remembered over a settling",
        R + "window.py",
        "        self.shares.forget_norms()\n        self.used",
        "        self.used",
    ),
    Mutant(
        "keep a stale master",
        R + "gatherer.py",
        "                self._masters.adopt(block)",
        "                pass",
    ),
    Mutant(
        "adopt every weight, edited or not",
        M + "masters.py",
        "    if masters.is_cpu and torch.equal(weights, masters.to(weights.dtype)):\n"
        "        return  # as nearly always; a device is not asked, since its answer would have to be waited for\n",
        "    masters.copy_(weights)\n",
    ),
    Mutant(
        "no version bump",
        R + "gatherer.py",
        "            torch.autograd.graph.increment_version(self._params.tensors[param])",
        "            pass",
    ),
    Mutant(
        "stand-ins only where used",
        R + "window.py",
        "            self.put |= 1 << index\n            if index != current:",
        "            if index != current:\n"
        "                continue\n"
        "            self.put |= 1 << index\n"
        "            if index != current:",
    ),
    Mutant(
        "stand-ins stay where nobody used",
        R + "window.py",
        "self.params.set_grad(index, self._stand_ins[index] if index in used else None)",
        "self.params.set_grad(index, self._stand_ins[index])",
    ),
    Mutant(
        "later overwrites instead of adding",
        M + "flat.py",
        "            self.shares[bucket].add_(values, alpha=factor)",
        "            self.shares[bucket].copy_(values).mul_(factor)",
    ),
    Mutant(
        "the second use overwrites the first",
        R + "reducer.py",
        "            if not fresh:\n"
        "                place.add_(values, alpha=1.0 if multiplier is None else multiplier)\n"
        "            else:",
        "            if True:",
    ),
    Mutant(
        "no catch-up rounds",
        R + "reducer.py",
        "        while self.sent < agreement.rounds:\n            self._send_next()\n",
        "",
    ),
    Mutant(
        "catch up one round too few",
        R + "reducer.py",
        "while self.sent < agreement.rounds:",
        "while self.sent < agreement.rounds - 1:",
    ),
    Mutant(
        "forget wide",
        R + "settler.py",
        "wide=reducer.wide_buckets | later & self._line.narrow_buckets,",
        "wide=0,",
    ),
    Mutant(
        "add the second use in the narrow dtype",
        R + "reducer.py",
        "if narrow and (multiplier is not None or dtype != bucket_dtype or self._has(index, param)):",
        "if narrow and multiplier is not None:",
    ),
    Mutant(
        "wide rounds leave the ordinary one out",
        R + "reducer.py",
        "            wide.add_(ordinary)\n",
        "",
    ),
    Mutant(
        "expected ignored",
        R + "reducer.py",
        "            self._expected = used_here\n",
        "",
    ),
    Mutant(
        "wait for what other ranks use",
        R + "reducer.py",
        "            self._expected = used_here\n",
        "            self._expected = agreement.used\n",
    ),
    Mutant(
        "discarded rounds are kept",
        R + "reducer.py",
        "self.flight.land_all(keep=not agreement.discard)",
        "self.flight.land_all(keep=True)",
    ),
    Mutant(
        "clearing keeps the sums",
        R + "window.py",
        "        self.reducer.drop()\n"
        "        self.shares.clear()\n"
        "        self.used = self.put = 0\n"
        "        self.scaling.weight = None\n"
        "        self.reducer.flight.factor = self.scaling.at_keeping(False)\n"
        "        self.since = Since()\n",
        "        self.reducer.drop()\n"
        "        self.used = self.put = 0\n"
        "        self.scaling.weight = None\n"
        "        self.reducer.flight.factor = self.scaling.at_keeping(False)\n"
        "        self.since = Since()\n",
    ),
    Mutant(
        "the user's own gradient is added to ours",
        R + "window.py",
        "            for index in set_bits(agreement.removed | agreement.replaced):\n                self.shares.zero(index)\n",
        "",
    ),
    Mutant(
        "a gradient that the user replaced is sent twice",
        R + "window.py",
        "            self.since.touched &= ~(1 << index)\n            self.reducer.drop_param(index)\n",
        "",
    ),
    Mutant(
        "the user's clearing is not seen",
        R + "window.py",
        "        return all(param.grad is None for param in self.params.tensors)",
        "        return False",
    ),
    Mutant(
        "local gradients are forgotten",
        R + "window.py",
        "            for index in found.local:\n                self._collect_local(index)\n",
        "",
    ),
    Mutant(
        "what waits aside is forgotten",
        R + "window.py",
        "        if aside is not None:\n            self.reducer.collect(index, aside.detach())\n",
        "",
    ),
    Mutant(
        "no_sync synchronises",
        R + "boundary.py",
        "        if self._no_sync_depth:\n            return False\n",
        "",
    ),
    Mutant(
        "weights count in the sum and not in the mean",
        R + "agreement.py",
        "weight=sum(counts.weight for counts in everyone) if",
        "weight=1.0 if",
    ),
    Mutant(
        "what counts nothing brings its NaN",
        R + "window.py",
        "        if self.scaling.multiplier == 0.0:\n            grad.detach().zero_()",
        "        if False:\n            grad.detach().zero_()",
    ),
    Mutant(
        "masters from the rounded weights",
        M + "flatten.py",
        "return sum_dtype(dtype) if rounded else dtype",
        "return dtype",
    ),
    Mutant(
        "publish only what this rank owns",
        R + "gatherer.py",
        "            if block.is_last and self._line.layout.num_shares > 1:\n",
        "            if False:\n",
    ),
    Mutant(
        "publish before the step is cast",
        R + "gatherer.py",
        "                self._masters.publish(block)\n",
        "                pass\n",
    ),
    Mutant(
        "the step moves what nobody used",
        "zero/optimizer.py",
        "            parts.updater.step(batch, used, verdict.coefficient)\n",
        "            parts.updater.step(batch, parts.params.all, verdict.coefficient)\n",
    ),
    Mutant(
        "the loss scale is not divided out",
        "zero/optimizer.py",
        "window.scaling.lacking = window.scaling.loss_scale = scale",
        "window.scaling.lacking = scale",
    ),
    Mutant(
        "a skipped step is applied",
        "zero/optimizer.py",
        "        if not verdict.apply:\n"
        "            self.skipped_steps += 1\n"
        "            self._check_progress(verdict.grad_norm)\n"
        "            return\n",
        "        if not verdict.apply:\n            self.skipped_steps += 1\n",
    ),
    Mutant(
        "a share too far",
        M + "flat.py",
        "return self._cut(index, self.line.layout.buckets[index].share(rank))",
        "return self._cut(index, self.line.layout.buckets[index].share(max(rank - 1, 0)))",
    ),
    Mutant(
        "sums in the dtype of the wire",
        C + "group.py",
        "total = rows[0].to(sum_dtype, copy=True)",
        "total = rows[0].clone()",
    ),
    Mutant(
        "rank 0's values are not sent to the others",
        R + "intake.py",
        "            self._group.broadcast(source).wait()\n",
        "",
    ),
    Mutant(
        "clipping by the norm of one parameter",
        R + "shares.py",
        "            local[param] = _joined(local[param], _as_term(amount, order), order)",
        "            local[param] = _as_term(amount, order)",
    ),
]

# Survivors, by name, and why they change nothing.
HARMLESS: dict[str, str] = {}


# Made mechanically ------------------------------------------------------------------------------------------------------

_SWAPPED = {ast.Add: ("+", "-"), ast.Sub: ("-", "+")}
_COMPARED = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}


def mechanical(num: int = NUM_MECHANICAL, seed: int = SEED) -> list[Mutant]:
    """As many, drawn from all the places where one can be made: files and kinds in turn, so that no kind takes all."""
    chance = random.Random(seed)
    by_kind: dict[str, list[Mutant]] = {}
    for path in sorted(path for floor in ("runtime", "memory", "comm") for path in (ROOT / "zero" / floor).glob("*.py")):
        for kind, mutant in _places(path):
            by_kind.setdefault(kind, []).append(mutant)
    for mutants in by_kind.values():
        chance.shuffle(mutants)
    chosen: list[Mutant] = []
    while len(chosen) < num and any(by_kind.values()):
        for kind in sorted(by_kind):
            if by_kind[kind] and len(chosen) < num:
                chosen.append(by_kind[kind].pop())
    return chosen


def _places(path: Path) -> Iterator[tuple[str, Mutant]]:
    source, relative = path.read_text(), path.relative_to(ROOT).as_posix()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(kind: str, first: int, last: int, old: str, new: str) -> Iterator[tuple[str, Mutant]]:
        at = source.find(old, first, last)
        if at >= 0:
            line = source.count("\n", 0, at) + 1
            found = " ".join(source[starts[line - 1] : starts[line] - 1].split())
            yield kind, Mutant(f"{kind} in {path.stem}: {found[:70]} [{old} -> {new}]", relative, old, new, at)

    def begin(node: ast.AST) -> int:
        return starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def end(node: ast.AST) -> int:
        return starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.BinOp)
            and type(node.op) in _SWAPPED
            and not isinstance(node.left, (ast.Constant, ast.JoinedStr))
        ):
            yield from place("swap", end(node.left), begin(node.right), *_SWAPPED[type(node.op)])
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
            yield from place("boundary", end(node.left), begin(node.comparators[0]), *_COMPARED[type(node.ops[0])])
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            text = source[begin(node) : end(node)]
            kind = "wait" if re.search(r"\bwait(_\w+)?\(", text) else "call"
            if not text.startswith("super()"):
                yield from place(kind, begin(node), end(node), text, "pass")
        elif isinstance(node, ast.Constant) and type(node.value) is int and source[begin(node) : end(node)].isdigit():
            yield from place("off by one", begin(node), end(node), str(node.value), str(node.value + 1))


# Trial ------------------------------------------------------------------------------------------------------------------


class Trial:
    """A process that has imported torch and nothing of `zero`, from which every mutant's process is forked."""

    def __init__(self, folder: Path, tests: Sequence[str]) -> None:
        self.folder = folder
        self.tests = tests
        self.answers = folder / "oracle"
        # The oracle runs in a process of its own: whoever has run a backward cannot be forked.
        if _in_child(lambda: self._ask_the_oracle(), folder / "said", 300.0) is None:
            raise RuntimeError("The points of the unchanged library failed; there is nothing to compare mutants with.")

    def _ask_the_oracle(self) -> str:
        from tests import parity

        points = _points()
        failures = parity.Failures()
        for point in points:
            problem = parity.judge(point, parity.train_over_loopback(0, 1, [point])[0])
            if problem is not None:
                failures[point] = problem
        if failures:
            raise AssertionError(failures)
        self.answers.write_bytes(pickle.dumps(_all_expected(points)))
        return "ok"

    def kill(self, mutant: Mutant) -> str | None:
        """By what it was killed; None for a survivor."""
        home = Path(tempfile.mkdtemp(dir=self.folder))
        for name in ("accelerators", "zero", "tests", "examples", "ci"):
            shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, home / name)
        changed = home / mutant.path
        changed.write_text(mutant.applied(changed.read_text()))
        try:
            found = _in_child(lambda: self._try_points(home), home / "said", MOST_S)
            if found is None:
                return "points: it never ended"
            return found if found != "survived" else self._try_tests(home)
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def _try_points(self, home: Path) -> str:
        sys.path.insert(0, str(home))
        from tests import parity

        assert parity.ShardedOptimizer.__module__ == "zero.optimizer"
        assert str(home) in str(sys.modules["zero"].__file__), sys.modules["zero"].__file__
        parity.LOOPBACK_TIME_LIMIT_S = 4.0
        parity._expected.update(pickle.loads(self.answers.read_bytes()))
        for point in _points():
            problem = parity.judge(point, parity.train_over_loopback(0, 1, [point])[0])
            if problem is not None:
                return f"points: {point}: {problem.strip().splitlines()[-1][:110]}"
        return "survived"

    def _try_tests(self, home: Path) -> str | None:
        tests = [test for test in self.tests if (home / test).exists()]
        if not tests:
            return None
        environment = {**os.environ, "PYTHONPATH": str(home), "OMP_NUM_THREADS": "1", "RANDOM_TRAININGS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", *tests]
        try:
            result = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=TESTS_MOST_S)
        except subprocess.TimeoutExpired:
            return "tests: they never ended"
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
        return (
            f"tests: {failed[0]}" if failed else None if result.returncode == 0 else f"tests: exit status {result.returncode}"
        )


def _points() -> list:
    """Several ranks, all cases, shuffled so that neighbours differ; the mutants meet them in this order."""
    from tests import grid

    points = [p for p in grid.covering(("cpu",)) if p.world in (2, 3) and (p.bucket == "huge" or "many" not in _tags(p))]
    random.Random(SEED).shuffle(points)
    return points[:NUM_POINTS]


def _tags(point) -> frozenset[str]:
    from tests.zoo import CASES

    return CASES[point.case].tags


def _all_expected(points) -> dict:
    from tests import parity

    answers = {}
    for point in points:
        parity.expected(point)
        answers.update(parity._expected)
    return answers


def _in_child(act: Callable[[], str], said: Path, most_s: float) -> str | None:
    """What `act` gave in a forked process; None where that took too long or failed."""
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            text = act()
        except BaseException as error:  # noqa: BLE001 - a mutant may fail as it is imported
            traceback.print_exc(limit=3, file=sys.stderr) if "oracle" in str(said.parent) else None
            text = f"points: {type(error).__name__}: {str(error)[:110]}"
        said.write_text(text)
        os._exit(0)
    deadline = time.monotonic() + most_s
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            text = said.read_text() if said.exists() else "points: its process died"
            said.unlink(missing_ok=True)
            return text
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--workers", type=int, default=1, help="mutants at a time")
    parser.add_argument("--points-only", action="store_true", help="leave out the tests that survivors of the points meet")
    given = parser.parse_args(arguments)
    mutants = [*NAMED, *mechanical()]
    if given.names:
        mutants = [mutant for mutant in mutants if any(name in mutant.name for name in given.names)]
    import torch._dynamo  # noqa: F401 - what every mutant's process would import for seconds

    import tests.grid
    import tests.ranks  # noqa: F401

    assert not any(name.split(".")[0] == "zero" for name in sys.modules)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trial = Trial(Path(folder), () if given.points_only else TESTS)
        workers = [mutants[index :: given.workers] for index in range(given.workers)]
        children = []
        for number, mine in enumerate(workers):
            child = os.fork()
            if child == 0:
                with (Path(folder) / f"results-{number}").open("a") as results:
                    for mutant in mine:
                        by = trial.kill(mutant)
                        print(f"{'SURVIVED' if by is None else 'killed'}  {mutant.name}  {by or ''}", flush=True)
                        results.write(f"{int(by is None)} {mutant.name}\n")
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        lines = [line for file in sorted(Path(folder).glob("results-*")) for line in file.read_text().splitlines()]
    survivors = [line[2:] for line in lines if line[0] == "1"]
    unexplained = [name for name in survivors if name not in HARMLESS]
    print(f"{len(mutants)} mutants, {len(lines)} tried, {len(survivors)} survived, {len(unexplained)} of them without a reason")
    for name in survivors:
        print(f"    {name}: {HARMLESS.get(name, 'NO REASON GIVEN')}")
    return 1 if unexplained or len(lines) != len(mutants) else 0


if __name__ == "__main__":
    sys.exit(main())
