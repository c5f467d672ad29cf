"""Adam's step without the optimizer's own loops, a bucket at a time: edits adopted, gradients added up and clipped, masters
stepped and rounded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, NamedTuple, Protocol

import torch

from zero.memory.addresses import address_of, addresses_of, storage_of
from zero.memory.deferred_sum import sum_together
from zero.memory.masters import adopt, adopt_together, cut
from zero.optim.several import of_user
from zero.plan.layout import Block, Piece, Span
from zero.runtime.kernels.sums import SumDtypes, stretch_of

# A piece, its master, and the group of its parameter; the group is None if the parameter was not used.
Member = tuple[Piece, torch.nn.Parameter, "dict[str, Any] | None"]
_Foreign = tuple[dict[str, Any], str, torch.Tensor, Any]  # a master's state, a name, the place of its value, and the value now


class StepDtypes(NamedTuple):
    """The dtypes of masters and of what goes with them. Either may be missing; if masters are the weights, both are."""

    masters: torch.dtype
    compared: torch.dtype | None = None  # the dtype of weights, which may have been edited
    rounded: torch.dtype | None = None  # the dtype of new weights, unless they replace the compared ones

    @property
    def is_offloaded(self) -> bool:
        """True if the weights are in other memory than the masters, to which no rows come."""
        return self.compared is not None and self.rounded is not None


def deferrable_sums(kinds: Iterable[StepDtypes], num_ranks: int) -> set[SumDtypes]:
    """Returns the dtypes that ranks send for such weights which take no more memory than their sum, with the dtype of sums; see
    [Note: deferred sums] in zero/memory/deferred_sum.py."""
    near = [kind for kind in kinds if not kind.is_offloaded]
    sent = {SumDtypes(kind.compared or kind.rounded or kind.masters, num_ranks, kind.masters) for kind in near}
    fitting = {kind for kind in sent if kind.number * kind.rows.itemsize <= kind.total.itemsize}
    return fitting | {SumDtypes(kind.masters, 1, kind.masters) for kind in near}


class Gradient(NamedTuple):
    """The gradient of a share: the sum of its rows, which are not changed, multiplied by one factor after the other."""

    rows: Sequence[torch.Tensor]
    factors: Sequence[float] = ()

    def cut(self, part: Span) -> Gradient:
        return Gradient([cut(row, part) for row in self.rows], self.factors)


class Settings(NamedTuple):
    """The settings of a step for elements that are stepped alike; names as in torch."""

    step: float
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool  # weight decay does not go through the moments, as in AdamW
    maximize: bool
    amsgrad: bool


class Elements(NamedTuple):
    """Elements that are stepped alike, side by side, with gaps between parameters."""

    masters: torch.Tensor
    moments: Sequence[torch.Tensor]
    weights: torch.Tensor | None  # the weights that masters are compared with, unless the masters are the weights
    rounded: torch.Tensor | None  # memory for the new weights, if they are written
    # Returns in order: the span, then master and moments.
    parameters: Callable[[], Sequence[tuple[Span, Sequence[torch.Tensor]]]]


Part = tuple[Gradient, Elements]


class Stepped(NamedTuple):
    """A block that is to be stepped: its members, its bucket's masters and gradient, and its own weights and new weights, if
    there are such."""

    block: Block
    members: Sequence[Member]
    masters: torch.Tensor
    gradient: Gradient
    weights: torch.Tensor | None
    rounded: torch.Tensor | None


@dataclass
class _Lists:
    """The lists with which several small blocks are stepped, as long as their members and state are the same objects."""

    counters: list[torch.Tensor]  # by block
    gradient: torch.Tensor  # memory for the gradient that is stepped with, which the next lists use too
    of_blocks: Sequence[torch.Tensor]  # parts of it, by block
    of_members: Sequence[torch.Tensor]  # parts of it, by member
    # Each group with the numbers of its members, and their masters and moments.
    groups: list[tuple[dict[str, Any], list[int], list[list[torch.Tensor]]]]


class Kernel(Protocol):
    """A kernel that computes a step of Adam."""

    @property
    def name(self) -> str:
        """The value of `kernels` that chooses it."""

    @property
    def lacks(self) -> Sequence[str]:
        """The settings of a group that it does not compute, and refuses. One that is neither here nor in `Settings` is
        ignored."""

    @property
    def step_lists(self) -> Callable[[Settings, Sequence[torch.Tensor], list[list[torch.Tensor]]], None] | None:
        """A function that steps many small members at once, given their gradients and lists of masters and moments; None if
        that does not pay."""

    def step(self, settings: Settings, parts: Sequence[Part]) -> None:
        """Steps several parts by the same settings. Weights and `rounded` may be the same memory."""


class FusedStep:
    """The step of Adam and AdamW on the host.

    [Note: runs]
    A call costs as much as some ten thousand elements. So what lies side by side with the same settings, which is nearly
    always all of a block, is stepped in one call, with the gaps between. For that the moments lie as the masters do: the
    optimizer's state of a parameter is a view of them. If blocks are so small that even that costs too much, several are
    stepped by operators on lists, which are made once.
    """

    def __init__(self, inner: torch.optim.Optimizer, kernel: Kernel) -> None:
        self._inner_of_user = of_user(inner)
        self._kernel = kernel
        self._moments: dict[tuple[int, str], torch.Tensor] = {}  # by bucket and torch's name; they never travel
        self._counters: dict[Block, torch.Tensor] = {}  # by block: the steps of each member, in their order
        self._placed: dict[tuple[Block, ...], _Placed] = {}  # by the blocks whose state was moved together
        self._lists: dict[tuple[Block, ...], _Lists | None] = {}  # None for blocks that cannot be stepped by lists
        self._scratch: torch.Tensor | None = None  # serves the gradients of one batch after the other

    @property
    def _inner(self) -> torch.optim.Optimizer:
        return self._inner_of_user()

    def check(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Raises if a group has a setting that the kernel knows nothing of."""
        name = self._kernel.name
        for group in groups:
            for setting in self._kernel.lacks:
                if group.get(setting):
                    raise ValueError(
                        f"Cannot use kernels='{name}': {setting} has no {name} step, and a group of the optimizer sets it. "
                        "Use kernels='torch'."
                    )

    def release(self) -> None:
        """Drops all moments. Those that the optimizer's state still has are adopted from it later."""
        self._moments.clear()
        self._counters.clear()
        self._placed.clear()
        self._lists.clear()
        self._scratch = None

    def take_lines(self, bucket: int, lines: Mapping[str, torch.Tensor]) -> None:
        """Makes these the moments of a bucket, by name. The memory of the old ones may be in other use by now."""
        for key in [key for key in self._moments if key[0] == bucket]:
            del self._moments[key]
        self._moments |= {(bucket, name): line for name, line in lines.items()}

    @torch.no_grad()
    def adopt_state(self, stepped: Sequence[tuple[Block, Sequence[Member], torch.Tensor]], stays: bool = True) -> None:
        """Moves the state of all members that are used to its place. Blocks come with their members in order and their bucket's
        masters. A value that lies in the memory of another one is copied before any is written. Unless the state `stays`, it
        leaves memory after the step, so nothing of it is kept."""
        blocks, members_of = tuple(block for block, *_ in stepped), [members for _, members, _ in stepped]
        known = self._placed.get(blocks)
        if known is not None and known.holds(self._inner, members_of):
            return
        foreign = list[_Foreign]()
        for block, members, masters in stepped:
            if block not in self._counters:
                with torch.inference_mode(False):
                    self._counters[block] = torch.zeros(len(members), dtype=torch.float32, device="cpu")
            foreign += self._misplaced_state(block, members, masters)
        places = (*self._counters.values(), *self._moments.values()) if foreign else ()
        ours = set(map(storage_of, places))
        values = [known.clone() if _lies_in(ours, known) else known for _, _, _, known in foreign]
        for (state, name, target, _), known in zip(foreign, values, strict=True):
            state[name] = target.zero_() if known is None else target.copy_(torch.as_tensor(known).reshape(target.shape))
        self._lists.clear()
        if not stays:
            return
        if blocks not in self._placed:  # replaces others that contain these blocks, as when each step uses other parameters
            self._placed = {others: placed for others, placed in self._placed.items() if set(others).isdisjoint(blocks)}
        self._placed[blocks] = _Placed.of(self._inner, members_of)

    @torch.no_grad()
    def step(self, batch: Sequence[Stepped]) -> None:
        """Steps blocks whose state lies in its place. Masters are compared with the weights first, and the new weights are
        written."""
        if len(batch) > 1 and self._step_by_lists(batch):
            return
        alike: dict[Settings, list[Part]] = {}
        for block, members, masters, gradient, weights, rounded in batch:
            for group, step, span, run in self._runs(block, members):
                part = span.shifted(-block.span.start)
                old, new = (None if whole is None else cut(whole, part) for whole in (weights, rounded))
                if group is not None:
                    names = _moments_of(group)
                    moments = [cut(self._moment(block.bucket, name, masters), span) for name in names]
                    one_by_one = partial(self._one_by_one, run, names, span.start)
                    elements = Elements(cut(masters, span), moments, old, new, one_by_one)
                    alike.setdefault(self._settings(group, step), []).append((gradient.cut(span), elements))
                    continue
                if old is not None:
                    adopt(old, cut(masters, span))
                if new is not None:
                    new.copy_(cut(masters, span))
        for settings, parts in alike.items():
            self._kernel.step(settings, parts)

    def _step_by_lists(self, batch: Sequence[Stepped]) -> bool:
        """Steps all of a batch with a few calls and returns True; returns False if that is not possible."""
        step_lists, blocks = self._kernel.step_lists, tuple(each.block for each in batch)
        if step_lists is None:
            return False
        if blocks not in self._lists:
            self._lists[blocks] = self._lists_of(batch)
        lists, (first, *others) = self._lists[blocks], (_kind_of(each) for each in batch)
        if lists is None or any(other != first for other in others):
            return False
        masters = [cut(each.masters, each.block.span) for each in batch]
        weights = [each.weights for each in batch if each.weights is not None]
        if weights:
            adopt_together(weights, masters)
        gradients = [each.gradient.cut(each.block.span) for each in batch]
        sum_together(gradients, lists.gradient, lists.of_blocks)
        torch._foreach_add_(lists.counters, 1)
        counts = torch.cat(lists.counters).tolist()
        for group, numbers, kinds in lists.groups:
            for count, places in _by_count([counts[number] for number in numbers]).items():
                stepped = kinds if len(places) == len(numbers) else [[kind[place] for place in places] for kind in kinds]
                step_lists(self._settings(group, count), [lists.of_members[numbers[place]] for place in places], stepped)
        rounded = [each.rounded for each in batch if each.rounded is not None]
        if rounded:
            torch._foreach_copy_(rounded, masters)
        return True

    def _lists_of(self, batch: Sequence[Stepped]) -> _Lists | None:
        """Returns the lists for blocks all of whose members were used, and None for others."""
        sizes, begin, end, number = list[int](), 0, 0, 0
        groups: dict[int, tuple[dict[str, Any], list[int], list[list[torch.Tensor]]]] = {}
        for block, members, *_ in batch:
            for piece, master, group in members:
                if group is None:
                    return None
                start = begin + piece.in_share.start - block.span.start
                sizes += start - end, piece.in_share.numel
                end = start + piece.in_share.numel
                names = _moments_of(group)
                _, numbers, kinds = groups.setdefault(id(group), (group, [], [[] for _ in range(1 + len(names))]))
                numbers.append(number)
                for kind, tensor in zip(kinds, (master, *map(self._inner.state[master].__getitem__, names)), strict=True):
                    kind.append(tensor)
                number += 1
            begin += block.span.numel
        sizes.append(begin - end)
        gradient = self._memory_for(begin, batch[0].masters.dtype)
        of_blocks = torch.split(gradient, [each.block.span.numel for each in batch])
        of_members = torch.split(gradient, sizes)[1::2]
        return _Lists([self._counters[each.block] for each in batch], gradient, of_blocks, of_members, list(groups.values()))

    def _memory_for(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self._scratch is None or self._scratch.numel() < numel or self._scratch.dtype != dtype:
            with torch.inference_mode(False):
                self._scratch = torch.empty(max(numel, stretch_of(0)), dtype=dtype, device="cpu")
        return self._scratch[:numel]

    def _one_by_one(
        self, run: Sequence[Member], names: Sequence[str], begin: int
    ) -> list[tuple[Span, tuple[torch.Tensor, ...]]]:
        state = self._inner.state
        return [(piece.in_share.shifted(-begin), (master, *map(state[master].__getitem__, names))) for piece, master, _ in run]

    def _runs(
        self, block: Block, members: Sequence[Member]
    ) -> Iterator[tuple[dict[str, Any] | None, float, Span, list[Member]]]:
        """Yields the group, step count, span and members of each run that is stepped alike. Together the runs cover the
        block."""
        runs: list[tuple[dict[str, Any] | None, float, int, list[Member]]] = []  # each run with its beginning
        for member, step in zip(members, self._advance(block, members), strict=True):
            piece, _, group = member
            if not runs or runs[-1][0] is not group or runs[-1][1] != step:
                runs.append((group, step, piece.in_share.start if runs else block.span.start, []))
            runs[-1][-1].append(member)
        runs = runs or [(None, 0.0, block.span.start, [])]
        for (group, step, begin, run), (_, _, end, _) in itertools.pairwise([*runs, (None, 0.0, block.span.stop, [])]):
            yield group, step, Span(begin, end), run

    def _advance(self, block: Block, members: Sequence[Member]) -> list[float]:
        """Counts a step in the state of each master that is used. Returns the counts of all members: 0 for those that are not
        used."""
        counters = self._counters[block]
        used = [index for index, (_, _, group) in enumerate(members) if group is not None]
        if len(used) == len(members):
            counters += 1
        else:
            counters[used] += 1
        counts = counters.tolist()
        return [0.0 if group is None else counts[index] for index, (_, _, group) in enumerate(members)]

    def _misplaced_state(self, block: Block, members: Sequence[Member], masters: torch.Tensor) -> Iterator[_Foreign]:
        """Yields state that lies elsewhere than in its place, or does not exist yet. There may be thousands of members, so
        little is done for each: a value in its place is recognised by its address."""
        lines: dict[str, tuple[torch.Tensor, int]] = {}  # by name of a moment: its line, and the address of that
        counters = self._counters[block]
        first_counter, counter_bytes = address_of(counters), counters.element_size()
        for index, (piece, master, group) in enumerate(members):
            if group is None:
                continue
            state, start, shape = self._inner.state[master], piece.in_share.start, master.shape
            known = state.get("step")  # the first entry of torch's own state, too
            if not isinstance(known, torch.Tensor) or address_of(known) != first_counter + index * counter_bytes:
                yield state, "step", counters[index], known
            for name in _moments_of(group):
                if name not in lines:
                    line = self._moment(block.bucket, name, masters)
                    lines[name] = line, address_of(line)
                line, address = lines[name]
                known = state.get(name)
                if known is None or address_of(known) != address + start * line.element_size():
                    yield state, name, line[start : piece.in_share.stop], known
                elif known.shape != shape:  # the kernel looks at no shape, so it was not meant for this one
                    state[name] = line[start : piece.in_share.stop]

    def _moment(self, bucket: int, name: str, masters: torch.Tensor) -> torch.Tensor:
        if (bucket, name) not in self._moments:
            with torch.inference_mode(False):
                self._moments[bucket, name] = torch.zeros_like(masters)
        return self._moments[bucket, name]

    def _settings(self, group: dict[str, Any], step: float) -> Settings:
        beta1, beta2 = map(float, group["betas"])
        lr, eps, decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
        return Settings(
            step, lr, (beta1, beta2), eps, decay, _is_decoupled(self._inner, group), group["maximize"], group["amsgrad"]
        )


class _Placed(NamedTuple):
    """The members of some blocks, and the state of those that are used, once it lies where it belongs."""

    members_of: list[Sequence[Member]]  # by block
    groups: list[dict[str, Any]]  # those of the members that are used
    moments: list[tuple[str, ...]]  # the names of the moments of each group
    masters: list[torch.nn.Parameter]  # those of the members that are used
    states: list[dict[str, Any]]  # by master
    sizes: list[int]  # by state
    entries: list[Any]  # all of one state, then of the next
    placed: list[torch.Tensor]  # those of the entries that have a place
    addresses: list[int]  # the addresses of these

    @classmethod
    def of(cls, inner: torch.optim.Optimizer, members_of: list[Sequence[Member]]) -> _Placed:
        used = [(master, group) for members in members_of for _, master, group in members if group is not None]
        groups = list({id(group): group for _, group in used}.values())
        states = [inner.state[master] for master, _ in used]
        of_states = zip(states, used, strict=True)
        placed = [state[name] for state, (_, group) in of_states for name in ("step", *_moments_of(group))]
        return cls(
            members_of, groups, list(map(_moments_of, groups)), [master for master, _ in used],
            states, list(map(len, states)), _entries_of(states), placed, addresses_of(placed),
        )  # fmt: skip

    def holds(self, inner: torch.optim.Optimizer, members_of: list[Sequence[Member]]) -> bool:
        """Returns True if they are the same, and nobody has put other tensors, or memory, in the place of their state."""
        return (
            all(map(is_, members_of, self.members_of))
            and list(map(_moments_of, self.groups)) == self.moments
            and all(map(is_, map(inner.state.get, self.masters), self.states))
            and list(map(len, self.states)) == self.sizes
            and all(map(is_, _entries_of(self.states), self.entries))
            and addresses_of(self.placed) == self.addresses
        )


def _entries_of(states: Iterable[Mapping[str, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(state.values() for state in states))


def _by_count(counts: Sequence[float]) -> dict[float, list[int]]:
    """Returns the places of members by the number of their steps."""
    places: dict[float, list[int]] = {}
    for place, count in enumerate(counts):
        places.setdefault(count, []).append(place)
    return places


def _kind_of(stepped: Stepped) -> object:
    """Returns what blocks have in common that are stepped by lists."""
    return [None if tensor is None else tensor.dtype for tensor in (stepped.masters, stepped.weights, stepped.rounded)]


def _lies_in(storages: Collection[int], known: Any) -> bool:
    """Returns whether a value is a tensor in one of these storages, given by their addresses."""
    return isinstance(known, torch.Tensor) and storage_of(known) in storages


def _is_decoupled(inner: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(inner, torch.optim.AdamW)))


def _moments_of(group: Mapping[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
