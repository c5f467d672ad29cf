"""`python -m zero plan MODEL` predicts what each stage will hold on every rank, and says whether that fits.

The model is a number of parameters, a configuration file, or a function that makes it. With a function a training can be
rehearsed as one of many ranks, activations included, on a device that counts every byte.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerators
from accelerators.memory import format_bytes, parse_bytes
from zero.tools.commands import DONE, NO, Subparsers, add_command, code_of, table, tell

if TYPE_CHECKING:  # imported in functions otherwise, as other subcommands need neither torch nor these
    import torch

    from zero.plan.budget import Cost
    from zero.plan.layout import FlatLayout, ParamSpec
    from zero.tools.activations import Activations

_DESCRIPTION = """Predicts the bytes of one rank at each stage, with masters, moments and gradients on the device or the host,
says which of them fit, and recommends one. MODEL is a number of parameters (7B), a Hugging Face configuration (config.json)
or its folder, or a function that makes the model (module:function, script.py:function).

With --disk, states may also live on disk ("disk"), and at stage 3 weights too ("disk+"). The peak is that of model states
alone: activations come on top, as much as the batch and the model need. With --tokens N, those of one sequence of N tokens are
counted, of a configuration (which needs transformers), or of a function that is called with the tokens of a rank. With --batch
N, the function is called with N. For both it returns the model and a function that computes a loss. With --batch, one rank of
the training then runs on a simulated device, of the package zero-accelerators-sim, and the peak shown is the one counted there,
activations included."""

_MOMENTS: dict[str, int | tuple[int, int]] = {
    "adamw": 2, "adam": 2, "lion": 1, "adagrad": 1, "rmsprop": 1, "momentum": 1, "sgd": 0,
    "muon": (1, 2),  # one for matrices, and two of AdamW for the rest
}  # fmt: skip
_COUNTED = ("ranks", "shard_ranks", "ep", "tp", "ranks_per_host", "accumulation", "batch", "tokens", "sequence_ranks",
            "loss_chunk", "mlp_chunk")  # the options that are numbers of something
_OF_TOKENS = {"sequence_ranks": 1, "recompute": False, "loss_chunk": None, "mlp_chunk": None, "activations_on_host": False}
_KERNELS = ("auto", "torch", "fused", "compiled")
_IN_ONE_PASS = ("adamw", "adam")  # the optimizers that kernels other than torch's step in one pass
_MOST_OWNERS = 4096  # the ranks for which a plan takes half a minute; more take longer than anybody waits
_LEAST_SECONDS = 1e-6  # the shortest time of a step
_LEAST_BUCKET = 64 * 1024
_LEAST_MEMORY = 2**20  # fewer bytes without a unit are GiB whose unit was forgotten
_WORDS = {"none": "", "cpu": ", offload to the host", "disk": ", states on disk", "disk+": ", states and weights on disk"}
_DTYPES = ("float32", "bfloat16", "float16")
_MOST_BUCKETS = 2**18  # the most buckets that a plan lists
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_WINDOWS = 2  # the first makes the optimizer's state, and learns the order of the gradients


@dataclass(frozen=True)
class Row:
    """The costs of one stage and place."""

    stage: int
    offload: str
    cost: Cost
    fits: str  # "yes", or the memory in which it does not fit
    disk_bytes: int = 0
    written_bytes: int = 0  # the bytes that go to the disk in a step

    def as_dict(self) -> dict[str, Any]:
        cost = self.cost
        figures = {**asdict(cost.device), "buckets": cost.buckets, "peak": cost.peak}
        beside = {"on_host": cost.host_peak, "on_disk": self.disk_bytes, "written": self.written_bytes}
        return {"stage": self.stage, "offload": self.offload, **figures, **beside, "fits": self.fits}


@dataclass(frozen=True)
class Space:
    """The memory that one rank may use."""

    words: str
    device: int | None  # the bytes of the device; None if they are not known
    host: int | None  # the bytes beside the device; None if there is no such host
    is_host: bool  # the device is the host
    disk: int | None = None  # the bytes to use; None for no disk

    def fits(self, cost: Cost, disk_bytes: int = 0) -> str:
        if self.device is not None and cost.peak > self.device:
            return "no"
        if disk_bytes > (self.disk or 0):
            return "not the disk"
        return "not the host" if self.host is not None and cost.host_peak > self.host else "yes"


def add_plan(subparsers: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(
        subparsers, "plan", "predict the memory of a training, and say whether it fits", _DESCRIPTION, _plan,
        "something fits", "nothing fits",
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help="a number, a config.json, module:function or script.py:function")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="the number of ranks, one a device (default: 1)")
    parser.add_argument("--shard-ranks", type=int, metavar="N", help="ranks that shard; the others replicate (default: all)")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="the number of expert-parallel ranks (default: 1)")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="the number of tensor-parallel ranks (default: 1)")
    parser.add_argument("--ranks-per-host", type=int, metavar="N", help="ranks on each host (default: one a device, 8 at most)")
    parser.add_argument("--memory", metavar="SIZE", help="memory of each device, such as 80GiB (default: of this machine's)")
    parser.add_argument("--host-memory", "--host", metavar="SIZE", help="memory of each host (default: this machine's)")
    parser.add_argument("--disk", metavar="SIZE", help="disk space of each host, for states and weights (default: none)")
    parser.add_argument("--step-seconds", type=float, default=10.0, metavar="S", help="for bytes written a day (default: 10)")
    parser.add_argument("--suggest", action="store_true", help="print the arguments for zero.shard")
    parser.add_argument("--accelerator", metavar="NAME", help="a name as in ACCELERATOR (default: the best there is)")
    parser.add_argument("--dtype", choices=_DTYPES, help="dtype of the weights (default: the model's, else bfloat16)")
    parser.add_argument("--optimizer", choices=_MOMENTS, default="adamw", help="sets the size of its state (default: adamw)")
    parser.add_argument("--kernels", choices=_KERNELS, default="auto", help="the kernels that step on the host (default: auto)")
    parser.add_argument("--accumulation", type=int, default=1, metavar="N", help="micro-batches a step (default: 1)")
    parser.add_argument("--bucket-bytes", metavar="SIZE", help="bytes of a bucket (default: as in zero.shard)")
    parser.add_argument("--gathered-bytes", default="0", metavar="SIZE", help="bytes gathered at stage 3, or all (default: 0)")
    parser.add_argument("--tokens", type=int, metavar="N", help="count the activations of a sequence of N tokens")
    parser.add_argument("--sequence-ranks", type=int, default=1, metavar="N", help="ranks that share a sequence (default: 1)")
    parser.add_argument("--recompute", action="store_true", help="blocks are recomputed in the backward")
    parser.add_argument("--loss-chunk", type=int, metavar="N", help="tokens at a time, as zero.in_chunks(model, N)")
    parser.add_argument("--mlp-chunk", type=int, metavar="N", help="tokens at a time, as zero.in_chunks(mlp, N)")
    parser.add_argument("--activations-on-host", action="store_true", help="as zero.activations_on_host(model)")
    parser.add_argument("--batch", type=int, metavar="N", help="simulate micro-batches of N, activations included")


def _check_numbers(args: argparse.Namespace) -> None:
    """Refuses numbers that no training has; what was left out gets its default."""
    for name in _COUNTED:
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"Cannot plan with --{name.replace('_', '-')} {getattr(args, name)}: it is at least 1. Raise it.")
    for name in ("memory", "host_memory", "disk"):
        if (size := getattr(args, name)) and size.isdecimal() and int(size) < _LEAST_MEMORY:
            option = f"--{name.replace('_', '-')} {size}"
            raise ValueError(f"Cannot plan with {option}: that is {size} bytes. Write it like {size}GiB.")
    if not _LEAST_SECONDS <= args.step_seconds < math.inf:
        raise ValueError(f"Cannot plan with --step-seconds {args.step_seconds}: a step takes some time. Give more than 1e-6.")
    for name in ("ep", "tp"):
        if args.ranks % getattr(args, name):
            what = f"--{name} {getattr(args, name)}: {args.ranks} ranks are not a multiple of it"
            raise ValueError(f"Cannot plan with {what}. Choose a divisor.")
    if args.batch is not None and max(args.ep, args.tp) > 1:
        raise ValueError("Cannot rehearse with --ep or --tp: --batch trains the model as it is. Leave them out.")
    chosen = [f"--{name.replace('_', '-')}" for name, usual in _OF_TOKENS.items() if getattr(args, name) != usual]
    if args.tokens is None and chosen:
        raise ValueError(f"Cannot plan with {chosen[0]} alone: activations are counted of a sequence. Give --tokens too.")
    if args.tokens is not None and (args.batch is not None or max(args.ep, args.tp) > 1):
        other = "--batch" if args.batch is not None else "--ep or --tp"
        raise ValueError(f"Cannot count activations with --tokens and {other}: they are those of a whole model. Leave one out.")
    if args.ranks % args.sequence_ranks:
        raise ValueError(
            f"Cannot plan with --sequence-ranks {args.sequence_ranks}: {args.ranks} ranks are not a multiple of it. Choose a "
            "divisor."
        )
    args.data_ranks = args.ranks // args.tp  # the ranks that have samples of their own
    args.shard_ranks = args.shard_ranks or args.data_ranks
    if args.data_ranks % args.ep:
        raise ValueError(
            f"Cannot plan with --tp {args.tp} and --ep {args.ep}: {args.data_ranks} ranks have samples of their own, which is "
            "no multiple of those that have experts together. Choose a divisor."
        )
    if args.optimizer == "muon" and args.shard_ranks > _MOST_OWNERS:
        raise ValueError(
            f"Cannot plan for Muon with {args.shard_ranks} ranks: each is given its matrices. Give {_MOST_OWNERS} or fewer."
        )
    if args.data_ranks % args.shard_ranks:
        raise ValueError(
            f"Cannot plan with --shard-ranks {args.shard_ranks}: {args.data_ranks} ranks are not a multiple of it. Choose a "
            "divisor."
        )


def _plan(args: argparse.Namespace) -> int:
    from zero.plan.budget import USUAL_BUCKET_BYTES, default_bucket_bytes
    from zero.plan.layout import ITEM_BYTES, FlatLayout

    _check_numbers(args)
    bucket_bytes = USUAL_BUCKET_BYTES if args.bucket_bytes is None else parse_bytes(args.bucket_bytes)
    if bucket_bytes < _LEAST_BUCKET:
        raise ValueError(f"Cannot plan with --bucket-bytes {args.bucket_bytes}: a bucket needs more. Give 64KiB or more.")
    args.gathered_bytes = math.inf if args.gathered_bytes == "all" else parse_bytes(args.gathered_bytes)
    space = _space(args)
    subject = read_subject(args.model, args.dtype, bucket_bytes, args.batch, args.tokens)
    whole_numel = subject.numel
    subject = replace(subject, params=tuple(of_one_rank(subject.params, args.ep, args.tp)))
    if args.bucket_bytes is None:
        on_network = space.is_host and (args.ranks_per_host or args.ranks) < args.ranks
        weight_bytes = sum(spec.numel * ITEM_BYTES[spec.dtype] for spec in subject.params)
        bucket_bytes = default_bucket_bytes(weight_bytes, args.ranks, on_network, space.is_host)
    owners = None
    if args.optimizer == "muon":
        if args.batch is not None:
            raise ValueError("Cannot rehearse with Muon: --batch trains with AdamW. Leave one of the two out.")
        subject = replace(subject, params=tuple(for_muon(subject.params)))
        owners = Owners.of(FlatLayout.build(subject.params, args.shard_ranks, bucket_bytes))
    if args.batch is not None and args.disk is not None:
        raise ValueError("Cannot rehearse with a disk: --batch counts the memory of a device. Leave one of the two out.")
    if args.batch is not None and subject.build is None:
        raise ValueError(f"Cannot plan with --batch {args.batch}: {args.model} makes no model. Give a function that does.")
    activations = None if args.tokens is None else _activations(args, subject, space)
    rows, counted = _rows(args, subject, space, bucket_bytes, activations)
    best = recommended(rows, args.ranks, args.accumulation)
    answer = {
        "model": subject.words, "parameters": whole_numel, "dtype": subject.dtypes, "ranks": args.ranks,
        "shard_ranks": args.shard_ranks, "ep": args.ep, "tp": args.tp, "parameters_of_a_rank": subject.numel,
        "memory_bytes": space.device, "host_memory_bytes": space.host, "includes_activations": bool(counted or activations),
        "activations": None if activations is None else asdict(activations),
        "rows": [{**row.as_dict(), "recommended": row is best} for row in rows],
        "owners": None if owners is None else owners.as_dict(),
    }  # fmt: skip
    tell(args.json, answer, "\n".join(_lines(args, subject, space, rows, best, counted or _words_of(activations), owners)))
    return NO if best is None else DONE


def _lines(
    args: argparse.Namespace, subject: Subject, space: Space, rows: Sequence[Row], best: Row | None, counted: str,
    owners: Owners | None,
) -> list[str]:  # fmt: skip
    """Returns the answer for people."""
    of = f"{args.batch} a micro-batch" if args.batch else f"{args.tokens:,} tokens" if args.tokens else ""
    note = f"activations of {of} are included: {counted}" if counted else "activations come on top"
    ranks = f"{args.ranks} rank{'s' * (args.ranks > 1)}"
    if args.shard_ranks < args.data_ranks:
        ranks += f" in groups of {args.shard_ranks}"
    for number, what in ((args.ep, "experts"), (args.tp, "layers")):
        ranks += f", {number} of them with the {what} together" if number > 1 else ""
    lines = [
        f"{subject.words}, {subject.dtypes}, {ranks}, {space.words}", "",
        _table(rows, best, space), "",
        f"The peak is that of {'a rehearsed window' if args.batch else 'model states' + ' alone' * (not counted)}; {note}.",
        "Nothing fits. Take more ranks, devices with more memory, or a narrower dtype." if best is None else
        f"* is recommended: stage {best.stage}{_WORDS[best.offload]}, "
        f"{format_bytes(best.cost.peak)} a rank.", *([] if owners is None else ["", *owners.words()]),
    ]  # fmt: skip
    if any(row.written_bytes for row in rows):
        written = (best and best.written_bytes) or max(row.written_bytes for row in rows)
        day = round(written * 86400 / args.step_seconds)
        lines.append(f"A rank writes at most {format_bytes(written)} to its disk in a step, and {format_bytes(day)} a day "
                     f"where a step takes {args.step_seconds:g} s.")  # fmt: skip
    if args.suggest and best is not None:
        more = f", shard_ranks={args.shard_ranks}" if args.shard_ranks < args.data_ranks else ""
        lines.append(f"zero.shard(..., {_arguments(best)}{more})")
    return lines


def recommended(rows: Sequence[Row], ranks: int, accumulation: int) -> Row | None:
    """Returns the fastest row that fits: without copies to the host rather than with them; stage 1 where gradients of several
    micro-batches are sent once, else stage 2; with one rank, nothing sharded."""
    order = (0, 1, 2, 3) if ranks == 1 else (1, 2, 0, 3) if accumulation > 1 else (2, 1, 0, 3)
    fitting = [row for row in rows if row.fits == "yes"]
    return min(fitting, key=lambda row: (list(_WORDS).index(row.offload), order.index(row.stage)), default=None)


def _arguments(row: Row) -> str:
    """Returns the arguments of `zero.shard`."""
    on_disk = {name: f", homes={dict.fromkeys(kinds, 'disk:/directory')}" for name, kinds in _on_disk().items()}
    homes = {"none": "", "cpu": ', offload="cpu"', **on_disk}
    return f"stage={row.stage}{homes[row.offload]}"


def _on_disk() -> dict[str, tuple[str, ...]]:
    """Returns the kinds of states that are on disk, by offload."""
    from zero.plan.homes import KINDS

    return {"disk": KINDS, "disk+": ("weights", *KINDS)}


def _space(args: argparse.Namespace) -> Space:
    accelerator = accelerators.current() if args.accelerator is None else accelerators.get(args.accelerator)
    host = parse_bytes(args.host_memory) if args.host_memory else accelerators.get("cpu").memory().total
    disk = parse_bytes(args.disk) if args.disk else None
    if args.memory is None and accelerator.device().type == "cpu":
        per_host = args.ranks_per_host or args.ranks
        each = None if host is None else host // per_host
        words = f"{per_host} to a host of {format_bytes(host)}"
        return Space(words, each, None, True, disk and disk // per_host)
    per_host = args.ranks_per_host or min(args.ranks, 8 if args.memory else accelerator.device_count())
    device = parse_bytes(args.memory) if args.memory else accelerator.memory().total
    of = "devices" if args.memory else accelerator.name
    words = f"{of} of {format_bytes(device)}, {per_host} to a host of {format_bytes(host)}"
    return Space(words, device, None if host is None else host // per_host, False, disk and disk // per_host)


def _activations(args: argparse.Namespace, subject: Subject, space: Space) -> Activations:
    """Returns what one rank needs in between for its tokens of a sequence."""
    from zero.memory.formats import DTYPES
    from zero.tools.activations import Sequences, activations_of, from_config, from_function

    on_host = args.activations_on_host and not space.is_host
    sequences = Sequences(args.tokens, args.sequence_ranks, args.recompute, args.loss_chunk, args.mlp_chunk, on_host)
    if subject.config is not None:
        if find_spec("transformers") is None:
            raise ValueError(
                "Cannot count activations of a configuration: transformers, which makes its model, is not installed. Do: pip "
                "install transformers, or give a function that makes the model."
            )
        build = from_config(subject.config, DTYPES[subject.params[0].dtype])
    elif subject.build is not None:
        if args.recompute or args.loss_chunk or args.mlp_chunk:
            raise ValueError(
                f"Cannot choose --recompute, --loss-chunk or --mlp-chunk for {args.model}: a function makes its model as it is "
                "trained. Do it there."
            )
        build = from_function(subject.build)
    else:
        raise ValueError(f"Cannot count activations of {args.model}: it is a number. Give a configuration, or a function.")
    with code_of(args.model):
        return activations_of(build, sequences)


def _words_of(activations: Activations | None) -> str:
    if activations is None:
        return ""
    device, each = format_bytes(activations.device), format_bytes(round(activations.slope))
    host = f", and {format_bytes(activations.host)} on the host" if activations.host else ""
    return f"{device} of a rank, {each} for each of its tokens{host}"


def _rows(
    args: argparse.Namespace, subject: Subject, space: Space, bucket_bytes: int, activations: Activations | None
) -> tuple[list[Row], str]:
    """Returns a row for each stage and place, and how they were counted by rehearsing, if they were."""
    from zero.plan.budget import PlannedTraining, busiest_rank, cost_of, disk_bytes, weights_bytes, written_bytes
    from zero.plan.families import Family
    from zero.plan.homes import Away
    from zero.plan.layout import FlatLayout
    from zero.plan.stages import STAGES

    rows, (device, counted) = [], counting_device() if args.batch else ("", "")
    hosted = 0 if activations is None else activations.host
    for offload in ("none", *(() if space.is_host else ("cpu",)), *(() if space.disk is None else _on_disk())):
        away = tuple(Away(kind, "disk:/directory") for kind in _on_disk().get(offload, ()))
        on_host = 0.0 if offload == "none" or space.is_host else 1.0
        params = [replace(spec, offload=on_host, away=away) for spec in subject.params]
        for stage, row in STAGES.items():
            if offload == "disk+" and not row.shards_weights:
                continue
            shares = args.shard_ranks if row.shards_optimizer else 1
            of_experts = Family(max(1, shares // args.ep), num_parts=args.ep)
            layout = FlatLayout.build(params, shares, bucket_bytes, parted=(of_experts,) * (args.ep > 1))
            fused_step = space.is_host and args.kernels != "torch" and args.optimizer in _IN_ONE_PASS
            moments, one_host = _MOMENTS[args.optimizer], space.is_host and (args.ranks_per_host or args.ranks) >= args.ranks
            rank = int(args.shard_ranks > 2)  # a rank that is neither the first nor the last receives the most
            rank = rank if args.optimizer != "muon" else busiest_rank(layout)
            training = PlannedTraining(
                moments, num_ranks=args.data_ranks, one_host=one_host, fused_step=fused_step, on_host=space.is_host,
                gathered_bytes=args.gathered_bytes, activations=0 if activations is None else activations.device,
            )  # fmt: skip
            cost = cost_of(layout, stage, rank, args.accumulation, training)
            frozen = dict.fromkeys(("device", "host", "disk"), 0)  # the memory in which trained weights are
            frozen[_home_of_frozen(offload, row.shards_weights, space.is_host)] = subject.frozen_bytes // (
                args.shard_ranks if row.shards_weights else 1
            )
            other_bytes = subject.buffer_bytes + frozen["device"]
            on_device = replace(cost.device, weights=cost.device.weights + other_bytes)
            on_host_too = frozen["host"] + hosted
            cost = replace(cost, device=on_device, peak=cost.peak + other_bytes, host_peak=cost.host_peak + on_host_too)
            if args.batch:
                assert subject.build is not None
                gathered = "all" if math.isinf(args.gathered_bytes) else args.gathered_bytes
                options = {"stage": stage, "dtype": args.dtype, "offload": offload, "bucket_bytes": bucket_bytes,
                           "gathered_bytes": gathered}  # fmt: skip
                of_ranks = args.ranks, args.shard_ranks
                with code_of(args.model):
                    peak = rehearse(subject.build, args.batch, of_ranks, device, args.accumulation, **options)
                cost = replace(cost, peak=peak)
            on_disk = sum(disk_bytes(layout, rank % shares, moments).values()) + weights_bytes(layout) + frozen["disk"]
            rounds = 1 if row.accumulates_locally else args.accumulation
            written = written_bytes(layout, rank % shares, moments, rounds)
            rows.append(Row(stage, offload, cost, space.fits(cost, on_disk), on_disk, written))
    return rows, counted


def _home_of_frozen(offload: str, shards_weights: bool, is_host: bool) -> str:
    if not shards_weights or offload == "none":
        return "device"
    return "disk" if offload == "disk+" else "device" if is_host else "host"


def _table(rows: Sequence[Row], best: Row | None, space: Space) -> str:
    kinds = ("weights", "gradients", "masters", "moments", "buckets", "peak", *(() if space.is_host else ("on_host",)),
             *(() if space.disk is None else ("on_disk",)))  # fmt: skip
    head = ("stage", "offload", *(kind.replace("_", " ") for kind in kinds), "fits")
    lines = []
    for row in rows:
        figures = row.as_dict()
        mark = " *" if row is best else ""
        lines.append((f"{row.stage}{mark}", row.offload, *(format_bytes(figures[kind]) for kind in kinds), row.fits))
    return table(head, lines, left=2)


# the model --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """The model to plan for: a description, its parameters, and a function that builds it if there is one."""

    words: str
    params: tuple[ParamSpec, ...]  # in the dtype in which they are trained
    frozen_bytes: int = 0
    buffer_bytes: int = 0
    build: Callable[..., Any] | None = None  # the user's function
    config: dict[str, Any] | None = None  # Hugging Face's config.json

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.params)

    @property
    def dtypes(self) -> str:
        return ", ".join(sorted({spec.dtype for spec in self.params}))


def read_subject(
    text: str, dtype: str | None, bucket_bytes: int, batch: int | None, tokens: int | None = None
) -> Subject:
    """Reads a number, a path or a function, in `dtype`, or in the model's own or the usual one."""
    from zero.plan.layout import ITEM_BYTES

    number = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    if number is not None:
        dtype = dtype or "bfloat16"
        size, most = float(number[1]) * _UNITS[number[2].upper()], max(1, bucket_bytes // ITEM_BYTES[dtype])
        if size > most * _MOST_BUCKETS:
            what = f"that is more than {_MOST_BUCKETS:,} buckets of {most:,}"
            raise ValueError(f"Cannot plan a model of {text} parameters: {what}. Give fewer, or a larger --bucket-bytes.")
        numel = round(size)
        return Subject(f"{numel:,} parameters", _parts_of(numel, dtype, most))
    if Path(text, "config.json").is_file():
        return _from_config(Path(text, "config.json"), dtype)
    if text.endswith(".json"):
        return _from_config(Path(text), dtype)
    return _from_function(text, dtype, batch, tokens)


_ENTRY = re.compile(r"(?:^|\.)experts\.(\d+)\.")
_EXPERTS = re.compile(r"(?:^|\.)experts(?:\.|$)")
# Layers that transformers' plans cut, with the dimension along which their weights are cut; a bias goes with the rows.
_CUT = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"), 0) | dict.fromkeys(
    ("o_proj", "down_proj"), 1
)


def of_one_rank(params: Sequence[ParamSpec], ep: int, tp: int) -> Iterator[ParamSpec]:
    """Yields what a rank holds where `ep` ranks have the experts together, or `tp` ranks the layers: of uneven parts the
    longest. Experts are known by `experts` in their names, as weights of all or as entries of a list."""
    from zero.plan.layout import with_length

    entries = [int(entry[1]) for spec in params if (entry := _ENTRY.search(spec.name))]
    num_entries = max(entries, default=-1) + 1
    if ep > 1 and not any(_EXPERTS.search(spec.name) for spec in params):
        raise ValueError("Cannot plan with --ep: no parameter has `experts` in its name. Leave it out, or give another model.")
    if tp > 1 and not any(_dim_of(spec) is not None for spec in params):
        raise ValueError(
            f"Cannot plan with --tp: no layer of the model is one of {', '.join(_CUT)}. Leave it out, or give another model."
        )
    for spec in params:
        entry, dim = _ENTRY.search(spec.name), _dim_of(spec)
        if ep > 1 and entry is not None:
            if int(entry[1]) < -(-num_entries // ep):
                yield replace(spec, family=1)
        elif ep > 1 and _EXPERTS.search(spec.name):
            yield replace(spec, shape=with_length(spec.shape, 0, -(-spec.shape[0] // ep)), family=1)
        elif tp > 1 and dim is not None:
            yield replace(spec, shape=with_length(spec.shape, dim, -(-spec.shape[dim] // tp)))
        else:
            yield spec


def _dim_of(spec: ParamSpec) -> int | None:
    """Returns the dimension along which plans cut a parameter; None for one that each rank has all of."""
    dim = _CUT.get(spec.name.split(".")[-2] if "." in spec.name else "")
    return dim if dim is not None and dim < len(spec.shape) else None


def _parts_of(numel: int, dtype: str, most: int) -> tuple[ParamSpec, ...]:
    """Returns as many parameters of the size of a bucket."""
    from zero.plan.layout import ParamSpec

    if numel < 1:
        raise ValueError(f"Cannot plan a model of {numel} parameters: it has at least one. Give more.")
    sizes = [most] * (numel // most) + [numel % most] * bool(numel % most)
    return tuple(ParamSpec(str(index), (size,), dtype) for index, size in enumerate(sizes))


def _from_config(path: Path, dtype: str | None) -> Subject:
    from zero.plan.known_models import parameters_of
    from zero.plan.layout import ITEM_BYTES, ParamSpec

    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Cannot read {path}: it is not JSON ({error}). Give a model's config.json.") from None
    if not isinstance(config, dict):
        raise ValueError(f"Cannot read {path}: it has a {type(config).__name__} in it. Give a model's config.json.")
    named = parameters_of(config)
    written = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    dtype = dtype or (written if written in ITEM_BYTES else "bfloat16")
    params = tuple(ParamSpec(name, shape, dtype) for name, shape in named)
    numel = sum(math.prod(shape) for _, shape in named)
    return Subject(f"{config['model_type']} of {numel:,} parameters ({path})", params, config=config)


def _from_function(text: str, dtype: str | None, batch: int | None, tokens: int | None) -> Subject:
    from torch import nn

    from zero.memory.formats import DTYPES, dtype_name
    from zero.plan.layout import ParamSpec

    given = {"--batch": batch, "--tokens": tokens}
    option, size = next(((name, size) for name, size in given.items() if size is not None), ("", 0))
    with code_of(text):
        build = _function(text)
        made = build(batch) if batch is not None else _on_nothing(partial(build, size) if option else build)
    if option and not (isinstance(made, (tuple, list)) and len(made) == 2):
        what = f"it returned a {type(made).__name__} for {option} {size}"
        raise TypeError(f"Cannot use {text}: {what}. Return the model, and a function that makes a loss of it.")
    model = made[0] if option else made
    if not isinstance(model, nn.Module):
        raise TypeError(f"Cannot use {text}: it returned a {type(model).__name__}. Return an nn.Module.")

    def trained_in(tensor: torch.Tensor) -> str:
        return dtype if dtype is not None and tensor.is_floating_point() else dtype_name(tensor.dtype)

    params = tuple(
        ParamSpec(name, tuple(param.shape), trained_in(param))
        for name, param in model.named_parameters() if param.requires_grad
    )  # fmt: skip
    frozen = (param for param in model.parameters() if not param.requires_grad)
    frozen_bytes = sum(param.numel() * (DTYPES[trained_in(param)].itemsize if param.is_floating_point() else param.itemsize)
                       for param in frozen)  # fmt: skip
    buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    numel = sum(spec.numel for spec in params)
    words = f"{type(model).__name__} of {numel:,} trained parameters ({text})"
    return Subject(words, params, frozen_bytes, buffer_bytes, build)


def _function(text: str) -> Callable[..., Any]:
    place, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise ValueError(
            f"Cannot use {text!r}: it is not a number of parameters, a .json file or a function. Write it like 7B, "
            "config.json, module:function or script.py:function."
        )
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ValueError(f"Cannot use {text!r}: there is no file {place!r}. Give the path of a Python script.")
        sys.path.insert(0, str(Path(place).resolve().parent))  # a script that is started finds its own folder there
        target = runpy.run_path(place, run_name="planned_script").get(name)
    else:
        sys.path.insert(0, "")
        try:
            target = getattr(importlib.import_module(place), name, None)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # a module that this one imports is missing
            what = f"there is no module {error.name!r} here"
            raise ValueError(f"Cannot use {text!r}: {what}. Give one, or script.py:function.") from error
    if not callable(target):
        raise ValueError(f"Cannot use {text!r}: there is no such function in {place}. Define it at the top.")
    function: Callable[..., Any] = target
    return function


def _on_nothing(build: Callable[..., Any]) -> Any:
    """Makes the model without memory for its weights, if it can be made so."""
    import torch

    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, NotImplementedError):  # the function looks at numbers, and tensors on the meta device have none
        return build()


# owners of matrices -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Owners:
    """The matrices of a layout by rank, if an optimizer steps whole ones."""

    tensors: list[int]  # by rank: the number of its matrices
    num_bytes: list[int]  # by rank: the bytes of their weights
    balance: float  # the work of the busiest rank, as a multiple of the mean
    padding: float  # the padding, as a ratio of what the matrices take
    largest_bucket: int  # the bytes of the largest bucket of whole matrices

    @staticmethod
    def of(layout: FlatLayout) -> Owners:
        from zero.plan.layout import ITEM_BYTES

        owned = [(layout.owner(param), spec) for param, spec in enumerate(layout.params)]
        ranks = range(layout.num_shares)
        works = [layout.work_of(rank) for rank in ranks]
        items = [(bucket, ITEM_BYTES[layout.chunks[bucket.chunk].dtype]) for bucket in layout.buckets if bucket.has_owners]
        needed = sum(spec.numel * ITEM_BYTES[spec.dtype] for owner, spec in owned if owner is not None)
        taken = sum(bucket.span.numel * item for bucket, item in items)
        return Owners(
            [sum(owner == rank for owner, _ in owned) for rank in ranks],
            [sum(spec.numel * ITEM_BYTES[spec.dtype] for owner, spec in owned if owner == rank) for rank in ranks],
            max(works) * len(works) / max(1, sum(works)),
            taken / max(1, needed) - 1,
            max((bucket.span.numel * item for bucket, item in items), default=0),
        )

    def words(self) -> list[str]:
        least, most = min(self.num_bytes), max(self.num_bytes)
        each = format_bytes(most) if least == most else f"{format_bytes(least)} to {format_bytes(most)}"
        few, many = min(self.tensors), max(self.tensors)
        number = f"{many}" if few == many else f"{few} to {many}"
        return [
            f"Muon steps {sum(self.tensors)} matrices, each on the rank that owns it: {number} a rank, {each} of weights.",
            f"The busiest rank has {self.balance:.2f} of the mean work, padding takes {self.padding:.1%}, and the largest "
            f"bucket has {format_bytes(self.largest_bucket)}.",
        ]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def for_muon(params: Sequence[ParamSpec]) -> list[ParamSpec]:
    """Puts what `"type": "Muon"` in a configuration gives to Muon into a group of its own, with the work of each."""
    from zero.optim.muon import is_for_muon

    specs = []
    for spec in params:
        is_matrix = is_for_muon(spec.name, len(spec.shape))
        specs.append(replace(spec, work=spec.numel * min(spec.shape[-2:])) if is_matrix else replace(spec, group=1))
    if not any(spec.work for spec in specs):
        raise ValueError("Cannot plan for Muon: there is no matrix. Give a model's config.json, or a function that makes it.")
    return specs


# rehearsing -------------------------------------------------------------------------------------------------------------


def counting_device() -> tuple[str, str]:
    """Returns the accelerator that a rehearsal runs on, and the counter of its memory."""
    if find_spec("accelerators_sim") is None:
        raise ValueError(
            "Cannot rehearse with --batch: the simulated device, on which a rank is counted, is not installed. "
            "Do: pip install zero-accelerators-sim (in a checkout of this project: pip install ./simulated)."
        )
    if accelerators.get("sim").unavailable_reason() is None:
        import accelerators_sim

        accelerators_sim.bring_up()
        accelerators_sim.configure(order="late")  # work is done as late as it may be, which needs the most memory
        return "sim", "allocated bytes of the simulated device"
    return "cpu", "resident bytes of the CPU, since the simulated device cannot be used here"


def rehearse(
    build: Callable[[int], Any], batch: int, ranks: tuple[int, int], device: str, accumulation: int = 1, **options: Any
) -> int:
    """Returns the most bytes that rank 0 of so many, of which so many share states, holds on the device in a window, of a
    training with `shard(..., **options)` and AdamW. `build(batch)` returns a model, and a function that makes a loss of it."""
    import torch

    from zero.comm.levels import fake_group
    from zero.sharding.optimizer import shard

    accelerator = accelerators.get(device)
    gc.collect()
    accelerator.synchronize()
    before = accelerator.memory().allocated or 0
    with accelerator.device():
        model, loss_of = build(batch)
        inner = torch.optim.AdamW(param for param in model.parameters() if param.requires_grad)
        optimizer = shard(model, inner, group=fake_group(*ranks), accumulation=accumulation, **options)
        peak = 0
        for _ in range(_WINDOWS):
            for _ in range(accumulation):
                accelerator.reset_peak_memory()
                loss = loss_of(model)
                optimizer.backward(loss)
                del loss
                peak = max(peak, accelerator.memory().peak or 0)
            accelerator.reset_peak_memory()
            optimizer.step()
            optimizer.zero_grad()
            peak = max(peak, accelerator.memory().peak or 0)
        optimizer.close()
    return peak - before
