"""The marks of parts: which parameters are one rank's part of a larger one, and along which ranks.

A mark lies on the module that has the parameter, and so goes with it into a copy of the model, as what lies on a parameter
does not; on the parameter itself only where it was given without its module.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zero.comm.group import Group
from zero.comm.levels import seats_of
from zero.comm.one_answer import exchange_texts
from zero.errors import RanksDiffer
from zero.memory.leaves import is_dtensor, local_of
from zero.plan.layout import PartSpec, with_length

_MARK = "_zero_part"  # the attribute of a parameter that has its mark
_MARKS = "_zero_parts"  # the attribute of a module that has the marks of its parameters, by name
# The attribute of a parameter with its mark in a module, in case that module is in no model.
_IN_MODULE = "_zero_part_in_module"
# The attribute of a module with the mark of the module's buffers: each rank along the mesh has values of its own in them.
_OF_MODULE = "_zero_part_of"
# The attribute with a parameter's shape and mark at the time when ranks told each other the lengths of its parts.
_TOLD = "_zero_part_told"


class PartMark(NamedTuple):
    """The mark of a parameter that is a part of a larger one: `ranks`, of the world, hold the parts in this order."""

    ranks: tuple[int, ...]
    dims: tuple[int, ...]  # the dimensions along which the larger one is cut; none if each rank has parameters of its own
    # The number of parts along each dimension; those of the last one follow each other in `ranks`.
    numbers: tuple[int, ...] = ()
    num_entries: int = 0  # the entries, on each rank, of a ModuleList that is cut instead; 0 if there is none
    # The parts of the parameter's name from the entry's number on, with those of modules that wrap another one.
    path: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()  # the shapes of all parts if they are uneven, once ranks have told each other

    @staticmethod
    def along(ranks: tuple[int, ...], dim: int | None) -> PartMark:
        return PartMark(ranks, ()) if dim is None else PartMark(ranks, (dim,), (len(ranks),))

    @property
    def where(self) -> str:
        """The dimensions, for a message."""
        return f"dimension{'s' * (len(self.dims) > 1)} {' and '.join(map(str, self.dims)) or None}"

    def cuts_of(self, shape: tuple[int, ...], part: int) -> Iterator[tuple[int, tuple[int, ...], int]]:
        """Yields, for each dimension along which the larger parameter is cut: the dimension, the lengths of all parts, and the
        place among them of part number `part`, which has this shape."""
        shapes, every = self.shapes or (shape,) * len(self.ranks), len(self.ranks)
        for dim, number in zip(self.dims, self.numbers, strict=True):
            every //= number
            yield dim, tuple(shapes[index * every][dim] for index in range(number)), part // every % number


def part(module_or_params: nn.Module | nn.Parameter | Iterable[nn.Parameter], mesh: Any, dim: int | None = 0) -> None:
    """Says that parameters are this rank's parts of larger ones; each rank along `mesh` has another part. Not a collective,
    but call it on all ranks, before `zero.shard`, and after any copy of the model is made.

    Gradients are summed over the ranks that hold the same part, and divided as those of every other parameter.

    Args:
        module_or_params: A module, for all of its parameters, or parameters.
        mesh: A DeviceMesh of one dimension, as `mesh["ep"]`, or a process group.
        dim: The dimension along which the larger parameter is cut, in the order of ranks: 0 for a weight `[expert, in, out]`.
            With None each rank has parameters of its own, such as experts in a ModuleList; a checkpoint joins the lists of the
            ranks in their order. A parameter that no rank with the same part used is not stepped.
    """
    from zero.comm.torch_world import ranks_along  # imported late, as torch.distributed is needed only for training

    ranks = ranks_along(mesh)
    if isinstance(module_or_params, nn.Module):
        _mark(module_or_params, PartMark.along(ranks, dim))
        return
    params = [module_or_params] if isinstance(module_or_params, torch.Tensor) else list(module_or_params)
    for param in params:
        if not isinstance(param, nn.Parameter):
            raise TypeError(
                f"Cannot mark a {type(param).__name__} as a part: it is not a Parameter. Pass a module, a Parameter or several."
            )
        setattr(param, _MARK, _checked(param, PartMark.along(ranks, dim)))


def _mark(module: nn.Module, mark: PartMark) -> None:
    """Marks the parameters of a module and all in it. Of lists in lists the outer one is cut."""
    named = {name: _checked(param, _below(mark, name)) for name, param in module._parameters.items() if param is not None}
    for name, of_param in named.items():
        module._parameters[name].__dict__.pop(_MARK, None)  # the latest call of zero.part counts
        setattr(module._parameters[name], _IN_MODULE, of_param)
    module.__dict__.update({_MARKS: named, _OF_MODULE: mark})
    if not mark.dims and not mark.num_entries and isinstance(module, nn.ModuleList):
        mark = mark._replace(num_entries=len(module))
    for name, child in module.named_children():
        _mark(child, _below(mark, name))


def _below(mark: PartMark, name: str) -> PartMark:
    return mark._replace(path=(*mark.path, name)) if mark.num_entries else mark


def _cut(mark: PartMark | None) -> tuple[object, ...]:
    return () if mark is None or len(mark.ranks) == 1 else (mark.ranks, mark.dims)


def _with_shapes(param: nn.Parameter, mark: PartMark) -> PartMark:
    """Returns the mark with the shapes that ranks have told each other, unless the parameter was cut otherwise since."""
    shape, agreed = getattr(param, _TOLD, (None, mark))
    is_same = shape == tuple(local_of(param).shape) and _cut(agreed) == _cut(mark)
    return mark._replace(shapes=agreed.shapes) if is_same else mark


def _checked(param: nn.Parameter, mark: PartMark) -> PartMark:
    for dim in mark.dims:
        if not -param.dim() <= dim < param.dim():
            raise ValueError(
                f"Cannot mark a parameter of shape {tuple(param.shape)} as a part along dimension {dim}, which it does not "
                "have. Give the dimension along which the whole one is cut, or None if each rank has parameters of its own."
            )
    return mark._replace(dims=tuple(dim % param.dim() for dim in mark.dims))


def mark_of_dtensor(name: str, param: Any) -> PartMark | None:
    """Returns the mark of a DTensor; None for other parameters, and for one that each rank has all of."""
    if not is_dtensor(param):
        return None
    mesh, placements = param.device_mesh, param.placements
    cut = [number for number, placement in enumerate(placements) if not placement.is_replicate()]
    if any(placement.__class__.__name__ == "_StridedShard" for placement in placements):
        raise ValueError(
            f"Cannot shard {name}: its placements are {placements}, so a rank has a piece of each of several weights that lie "
            "in one tensor. Leave it whole, make a parameter of each weight, or have whole experts on each rank, as an ep_plan "
            "of transformers does."
        )
    dims = tuple(placements[number].dim % param.dim() for number in cut if placements[number].is_shard())
    if any(placement.is_partial() for placement in placements) or not _lie_in_rows(dims):
        raise ValueError(
            f"Cannot shard {name}: its placements are {placements}, and a DTensor is cut along one dimension, or along its "
            "first and another one. Distribute it so."
        )
    if not cut:
        return None
    place = tuple(slice(None) if number in cut else index for number, index in enumerate(mesh.get_coordinate()))
    ranks, numbers = tuple(map(int, mesh.mesh[place].flatten().tolist())), tuple(map(mesh.size, cut))
    return PartMark(ranks, dims, numbers, shapes=_uneven(_shapes_of(param.shape, dims, numbers)))


def _lie_in_rows(dims: Sequence[int]) -> bool:
    """Returns whether parts along these dimensions are each one stretch of the whole, or of what lies beside each other along
    one of them, as a box has it."""
    return len(dims) < 2 or (len(dims) == 2 and len({*dims}) == 2 and 0 in dims)


def _shapes_of(whole: Sequence[int], dims: Sequence[int], numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the shapes of all parts, as torch cuts tensors: all but the last ones are as long as the first."""
    shapes = [tuple(whole)]
    for dim, number in zip(dims, numbers, strict=True):
        starts = [min(part * -(-whole[dim] // number), whole[dim]) for part in range(number + 1)]
        lengths = [stop - start for start, stop in itertools.pairwise(starts)]
        shapes = [with_length(shape, dim, length) for shape in shapes for length in lengths]
    return shapes


def _uneven(shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    return tuple(shapes) if len(set(shapes)) > 1 else ()


def is_of_expert(param: Any) -> bool:
    """Returns whether a parameter says that it is of an expert of DeepSpeed's kind."""
    return getattr(param, "allreduce", True) is False


def check_whole_here(model: nn.Module, subject: str, instead: str) -> None:
    """Raises if this rank has parts of the model's parameters only."""
    if Parts(model).meshes:
        raise ValueError(f"Cannot {subject}: each rank has only its part of some parameters of the model. {instead}")


class Box(NamedTuple):
    """The place of a parameter in what is stored of all ranks."""

    name: str
    shape: tuple[int, ...]
    # The place of the parameter's first element in the whole one as it is stored, where the parts lie one after the other.
    start: int = 0
    # The dimension other than the first along which the whole one is cut, and the lengths of the parts; None if there is none.
    cut: tuple[int, tuple[int, ...]] | None = None
    names: tuple[str, ...] = ()  # the names of all parts, if ranks have parameters of their own
    corner: tuple[int, ...] = ()  # the index of the parameter's first element in the whole one, by dimension

    def cut_from(self, whole: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a part of this shape of the whole parameter, as a view."""
        for dim, first in enumerate(self.corner):
            whole = whole.narrow(dim, first, shape[dim])
        return whole


def _box_of(name: str, mark: PartMark, shape: tuple[int, ...], part: int) -> Box:
    """Returns where a part of this number and shape lies. Parts along the first dimension are rows of the whole one, or of each
    of its parts along another dimension."""
    whole, corner, cut = list(shape), [0] * len(shape), None
    for dim, lengths, number in mark.cuts_of(shape, part):
        whole[dim], corner[dim] = sum(lengths), sum(lengths[:number])
        cut = (dim, lengths) if dim else cut
    start = corner[0] * math.prod(shape[1:])
    if cut is not None:
        start += corner[cut[0]] * math.prod(with_length(whole, cut[0], 1))
    return Box(name, tuple(whole), start, cut, corner=tuple(corner))


def _text_of(lengths: Sequence[int]) -> str:
    return " and ".join(map(str, lengths))


class Parts:
    """The parts of a training: each parameter that is one has the family of the ranks that hold the same part.

    Families are numbered from 1 on, by the meshes of the parts in the order in which the model comes to them, which is the same
    on all ranks; 0 is that of whole parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.meshes: list[tuple[int, ...]] = []  # by family: the ranks that have a parameter together
        self._marks: dict[int, PartMark] = {}  # by id of the parameter
        self._unsaid: dict[str, PartMark] = {}  # by name: DTensors that nobody passed to zero.part
        self._noted: set[int] = set()  # ids of parameters with a mark, those along a single rank too
        if isinstance(model, nn.Module):  # another object is refused later, when ranks can tell each other
            self.take(model, [param for group in getattr(optimizer, "param_groups", ()) for param in group["params"]])

    def take(self, model: nn.Module, params: Iterable[nn.Parameter]) -> None:
        """Takes in the marks of a model's parameters, and of these others."""
        places: dict[int, tuple[str, PartMark | None]] = {}
        for prefix, module in model.named_modules():
            marks: Mapping[str, PartMark] = module.__dict__.get(_MARKS, {})
            of_module = dict(module.named_parameters(recurse=False, remove_duplicate=False))
            for name in (*of_module, *(name for name in marks if name not in of_module)):
                full_name, param = f"{prefix}.{name}" if prefix else name, of_module.get(name)
                if param is None:
                    raise ValueError(
                        f"Cannot shard: {full_name} was said to be a part, and is not a parameter any more. Call zero.part "
                        "again once the model has the parameters that it trains."
                    )
                mark = getattr(param, _MARK, marks.get(name))
                first, of_first = places.setdefault(id(param), (full_name, mark))
                if _cut(of_first) != _cut(mark):
                    raise ValueError(
                        f"Cannot shard: {min(first, full_name)} and {max(first, full_name)} are one parameter, and zero.part "
                        "was said of them in different ways. Say the same of both, or untie them."
                    )
            self._note((of_module[name], mark) for name, mark in marks.items())
        others = [param for param in params if id(param) not in places]
        self._note((param, getattr(param, _IN_MODULE)) for param in others if hasattr(param, _IN_MODULE))
        params = (*model.parameters(), *others)
        self._note((param, getattr(param, _MARK)) for param in params if hasattr(param, _MARK))
        named = {id(param): name for name, param in model.named_parameters()}
        for param in filter(is_dtensor, params):
            name = named.get(id(param), "a parameter of the optimizer")
            mark, said = mark_of_dtensor(name, param), self.mark_of(param)
            if mark is not None and said is not None and _cut(said) != _cut(mark):
                raise ValueError(
                    f"Cannot shard: {name} is a DTensor that is cut along {mark.where}, and zero.part was said of it "
                    "in another way. Leave zero.part out, or say the same."
                )
            if mark is not None and said is None and len(mark.ranks) > 1:
                self._unsaid[name] = mark
            self._note([] if mark is None else [(param, mark)])
        marked = (self._marks[id(param)].ranks for param in params if id(param) in self._marks)
        self.meshes.extend(ranks for ranks in dict.fromkeys(marked) if ranks not in self.meshes)

    def _note(self, marked: Iterable[tuple[nn.Parameter | None, PartMark]]) -> None:
        """Notes marks of parameters. Along one rank alone a part is the whole parameter."""
        for param, mark in marked:
            self._noted.add(id(param))
            if param is not None and len(mark.ranks) > 1:
                self._marks[id(param)] = self._marks[id(local_of(param))] = _with_shapes(param, mark)

    def check_said(self) -> None:
        """Raises if nobody said whether ranks that hold parts have samples of their own, as `zero.part` and a group do."""
        for name, mark in self._unsaid.items():
            raise ValueError(
                f"Cannot shard without group: {name} is a DTensor, of which ranks {list(mark.ranks)} have parts. If these have "
                "the same samples, as with tensor parallelism, pass group=mesh['dp'], the ranks that have others; if each has "
                "its own, as with experts, pass the group of all, or call zero.part."
            )

    def knows_shapes(self, param: torch.Tensor) -> bool:
        """Returns whether the shapes of all parts are known: of a plain part once ranks have told each other."""
        mark = self.mark_of(param)
        return mark is None or not mark.dims or is_dtensor(param) or hasattr(param, _TOLD)

    def agree(self, params: Iterable[nn.Parameter], group: Group) -> None:
        """Takes note of the shapes of all parts, where those along a mesh are uneven. A collective, if there are parts."""
        if not self.meshes:
            return
        known = range(1, len(seats_of(group)) + 1)  # a mesh that is new has no seats, and is refused later
        marked = ((param, self.mark_of(param)) for param in dict.fromkeys(params) if self.family_of(param) in known)
        cut = [(param, mark) for param, mark in marked if mark is not None and mark.dims]
        facts = [(self.family_of(param), [local_of(param).shape[dim] for dim in mark.dims]) for param, mark in cut]
        of_ranks = [json.loads(text) for text in exchange_texts(group, json.dumps(facts))]
        if any([family for family, _ in each] != [family for family, _ in facts] for each in of_ranks):
            return  # ranks have built different things, which the comparison of setups reports
        for number, (param, mark) in enumerate(cut):
            lengths: dict[int, list[int]] = {}
            for rank, (part, *_) in enumerate(seats_of(group)[facts[number][0] - 1]):
                held = of_ranks[rank][number][1]
                if lengths.setdefault(part, held) != held:
                    raise RanksDiffer(
                        f"Cannot shard: rank {rank} of {group.size} has {_text_of(held)} of a parameter along {mark.where}, "
                        f"and another rank that holds the same part has {_text_of(lengths[part])}. Build the same where the "
                        "same is held."
                    )
            shapes = [tuple(local_of(param).shape)] * len(lengths)
            for index, dim in enumerate(mark.dims):
                shapes = [with_length(shape, dim, lengths[part][index]) for part, shape in enumerate(shapes)]
            agreed = mark._replace(shapes=_uneven(shapes))
            setattr(param, _TOLD, (tuple(local_of(param).shape), agreed))
            self._note([(param, agreed)])

    def check_experts(self, model: nn.Module) -> None:
        """Raises if a parameter says by itself that other ranks have other experts, and nobody said which ranks."""
        for name, param in model.named_parameters():
            if is_of_expert(param) and id(param) not in self._noted:
                raise ValueError(
                    f"Cannot shard {name}: it is of an expert that only some ranks have (allreduce=False), and nobody said "
                    "which. Call zero.part, or set_deepspeed_parallelism() of a layer of DeepSpeed's kind, or train with "
                    "zero.initialize."
                )

    def mark_of(self, param: torch.Tensor) -> PartMark | None:
        """Returns the mark of a part; None for a whole parameter."""
        return self._marks.get(id(param))

    def box_of(
        self,
        name: str,
        param: torch.Tensor,
        shape: tuple[int, ...],
        part_of: Callable[[int], int],
        unwrapped: Callable[[str], str],
    ) -> Box:
        """Returns where a parameter of this name and shape is stored; `part_of` gives the part that this rank has of a family,
        and `unwrapped` the names as they are stored. Raises if that is not known how."""
        mark = self.mark_of(param)
        if mark is None:
            return Box(name, shape)
        part, number = part_of(self.spec_of(param).family), len(mark.ranks)
        if mark.dims:
            return _box_of(name, mark, shape, part)
        path, depth = name.split("."), len(unwrapped(".".join(mark.path)).split("."))
        if not mark.num_entries or not path[-depth].isdecimal():
            raise ValueError(
                f"Cannot save or load {name}: each rank has another parameter of this name, and it is not in a "
                "ModuleList. Give a ModuleList to zero.part with dim=None, or the dimension along which it is cut."
            )
        entry, rest = int(path[-depth]), path[-depth + 1 :]
        names = [".".join([*path[:-depth], str(entry + other * mark.num_entries), *rest]) for other in range(number)]
        return Box(names[part], shape, names=tuple(names))

    def boxes_of(self, named: Mapping[str, nn.Parameter], unwrapped: Callable[[str], str]) -> dict[str, Box]:
        """Returns where parameters are stored, by their names in the model of this rank. See `box_of`."""
        if not self.meshes:
            return {name: Box(name, tuple(local_of(param).shape)) for name, param in named.items()}
        return {name: self.box_of(name, param, tuple(local_of(param).shape), self._place, unwrapped)
                for name, param in named.items()}  # fmt: skip

    def box_in(self, name: str, param: torch.Tensor, whole: Sequence[int]) -> Box | None:
        """Returns where a parameter lies in a whole one of this shape, if torch would cut it so. Ranks have not told each other
        the lengths of uneven parts before the model is sharded."""
        mark, shape = self.mark_of(param), tuple(local_of(param).shape)
        if mark is None or not mark.dims or len(whole) != len(shape):
            return None
        shapes, part = _shapes_of(whole, mark.dims, mark.numbers), self.part_of(param)
        return _box_of(name, mark._replace(shapes=tuple(shapes)), shape, part) if shapes[part] == shape else None

    def spec_of(self, param: torch.Tensor) -> PartSpec:
        mark = self.mark_of(param)
        if mark is None:
            return PartSpec(0, False)
        return PartSpec(self.meshes.index(mark.ranks) + 1, not mark.dims, mark.shapes)

    def family_of(self, param: torch.Tensor) -> int:
        return self.spec_of(param).family

    def part_of(self, param: torch.Tensor) -> int:
        """Returns the number of the part that this rank has; 0 for a whole parameter."""
        return self._place(self.family_of(param))

    def _place(self, family: int) -> int:
        from zero.comm.torch_world import rank_in_world

        return self.meshes[family - 1].index(rank_in_world()) if family else 0

    def of_parameters(self, model: nn.Module) -> Iterator[tuple[torch.Tensor, int]]:
        """Yields what this rank has of each parameter, and the number of that part."""
        for param in model.parameters():
            yield local_of(param), self.part_of(param)

    def of_buffers(self, model: nn.Module) -> Iterator[tuple[torch.Tensor, int]]:
        """Yields each buffer, and the number of the part that it lies beside."""
        for module in model.modules():
            for buffer in module.buffers(recurse=False):
                yield buffer, self._place(self.family_of_buffers(module))

    def family_of_buffers(self, module: nn.Module) -> int:
        """Returns the number of the family of a module's buffers, which go with the parts of its parameters; 0 for none."""
        mark: PartMark | None = module.__dict__.get(_OF_MODULE)
        return self.meshes.index(mark.ranks) + 1 if mark is not None and mark.ranks in self.meshes else 0
