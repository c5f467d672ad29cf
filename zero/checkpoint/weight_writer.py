"""Writes weights for other programs: one file, or several with an index, with a stretch in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from zero.checkpoint import disk
from zero.checkpoint.progress_bar import ProgressBar
from zero.checkpoint.tensor_files import has_name, write_stream
from zero.memory.formats import bytes_of
from zero.memory.values import Values
from zero.plan.spans import Span

_AT_ONCE = 2**24  # bytes that are read at a time

Sizes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def ordered(sizes: Sizes) -> Sizes:
    """Those of the widest dtype first, so that each begins at a multiple of it."""
    return dict(sorted(sizes.items(), key=lambda pair: -pair[1][0].itemsize))


def write_file(
    path: Path, sizes: Sizes, values_of: Callable[[str], Values], metadata: Mapping[str, str], bar: ProgressBar
) -> None:
    """Writes a safetensors file, whole or not at all."""
    unknown = next((f"{name} is {dtype}" for name, (dtype, _) in sizes.items() if not has_name(dtype)), None)
    if unknown is not None:
        raise ValueError(f"Cannot write {path.name}: {unknown}, which has no name there. Cast it, or use torch.save.")
    beside = path.with_name(f".{path.name}.saving")
    beside.unlink(missing_ok=True)
    try:
        sizes = ordered(sizes)
        write_stream(beside, sizes, _stretches(sizes, values_of), bar.advance, metadata)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_files(
    folder: Path,
    stem: str,
    sizes: Sizes,
    values_of: Callable[[str], Values],
    metadata: Mapping[str, str],
    bar: ProgressBar,
    shard_bytes: int,
) -> list[Path]:
    """Writes safetensors files of about so many bytes, and an index: all of them or none. Returns their paths."""
    shards, index_name = shards_of(stem, sizes, shard_bytes), index_of(stem)
    with disk.filled(folder, last=index_name) as hidden:
        for file_name, shard in shards.items():
            write_file(hidden / file_name, shard, values_of, metadata, bar)
        places = {name: file_name for file_name, shard in shards.items() for name in shard}
        index = {"metadata": {"total_size": total_bytes(sizes)}, "weight_map": dict(sorted(places.items()))}
        disk.write(hidden / index_name, [json.dumps(index, indent=2).encode()])
    return [folder / name for name in (*shards, index_name)]


def index_of(stem: str) -> str:
    return f"{stem}.safetensors.index.json"


def shards_of(stem: str, sizes: Sizes, shard_bytes: int) -> dict[str, Sizes]:
    """Returns the names of files of about so many bytes, and what is in each of them."""
    shards = list(_cut(ordered(sizes), shard_bytes))
    return {f"{stem}-{number:05}-of-{len(shards):05}.safetensors": shard for number, shard in enumerate(shards, 1)}


def _stretches(sizes: Sizes, values_of: Callable[[str], Values]) -> Iterator[torch.Tensor]:
    for name, (dtype, shape) in sizes.items():
        values = values_of(name)
        for stretch in Span(0, torch.Size(shape).numel()).cut(_AT_ONCE // dtype.itemsize):
            yield values.read(stretch)


def in_file(tensor: torch.Tensor, file: Path) -> torch.Tensor:
    """Returns the same values in a file of its own, which is removed with the tensor: for torch.save, which wants all tensors
    at once."""
    tensor = tensor.detach().contiguous()
    file.write_bytes(bytes_of(tensor))
    mapped = torch.from_file(str(file), size=tensor.numel(), dtype=tensor.dtype) if tensor.numel() else tensor
    return mapped.reshape(tensor.shape)


def total_bytes(sizes: Sizes) -> int:
    return sum(map(_num_bytes, sizes.values()))


def _num_bytes(size: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return torch.Size(size[1]).numel() * size[0].itemsize


def _cut(sizes: Sizes, shard_bytes: int) -> Iterator[Sizes]:
    shard: Sizes = {}
    so_far = 0
    for name, size in sizes.items():
        if shard and so_far + _num_bytes(size) > shard_bytes:
            yield shard
            shard, so_far = {}, 0
        shard[name] = size
        so_far += _num_bytes(size)
    if shard:
        yield shard
