"""transformers' `from_pretrained` for models that are sharded afterwards: weights stay in their files until then.

transformers builds the model, renames and converts the tensors of its files, initialises missing ones and ties weights, as
without sharding. It is given tensors that are read only when the model is sharded. See [Note: unread weights].
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import accelerators
from zero.checkpoint.weight_files import WeightFiles
from zero.comm.connect import connect
from zero.comm.exchange import exchange_about
from zero.errors import BadCheckpoint, RankFailed, RanksDiffer
from zero.plan.stages import stage_of
from zero.runtime.params.unread import Unread


def from_pretrained(model_class: Any, name: Any, *args: Any, stage: int, **options: Any) -> Any:
    """Returns `model_class.from_pretrained(name, *args, **options)` for a model that will be sharded at this stage, by
    `zero.shard`, a `ShardedTrainer` or another integration. Each rank then reads its shares of the weights. A collective at
    stage 3."""
    with loading(stage=stage):
        return model_class.from_pretrained(name, *args, **options)


class loading:
    """Makes transformers' own `from_pretrained` leave weights in their files, for models that will be sharded at stage 3. At
    other stages, where weights are whole on all ranks, it reads them.

    The end of the block is a collective at stage 3: all ranks raise where one failed to load, or where ranks have different
    files.
    """

    def __init__(self, *, stage: int) -> None:
        self._is_wanted = stage_of(stage).shards_weights
        self._before: Any = None
        self._loaded: list[str] = []  # what of, for other ranks

    def __enter__(self) -> None:
        if self._is_wanted:
            # of the class, which is no bound method; a function that it is called as
            self._before = PreTrainedModel.__dict__["_load_pretrained_model"]
            PreTrainedModel._load_pretrained_model = staticmethod(self._load)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if not self._is_wanted:
            return
        PreTrainedModel._load_pretrained_model = self._before
        if error is None or isinstance(error, Exception):
            self._agree(error)

    def _agree(self, error: Exception | None) -> None:
        group = connect(accelerators.current())
        try:
            said = f"{type(error).__name__}: {error}" if error is not None else None
            messages = [json.loads(text) for text in exchange_about(group, "a load", json.dumps([said, self._loaded]).encode())]
        finally:
            group.close()
        if error is not None:
            return
        for rank, (failure, loaded) in enumerate(messages):
            if failure is not None:
                raise RankFailed(f"Cannot load the model: rank {rank} of {group.size} could not. {failure}")
            if loaded != messages[0][1]:
                raise RanksDiffer(
                    f"Cannot load the model: rank {rank} of {group.size} has other files than rank 0. Give all ranks the same."
                )

    def _load(self, model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **options: Any) -> Any:
        """What transformers calls to bring the values of files into a model on the meta device."""
        _check(model, load_config)
        if state_dict is None and checkpoint_files:
            state_dict = self._unread(list(map(Path, checkpoint_files)), load_config.sharded_metadata)
        result = self._before.__func__(model, state_dict, checkpoint_files, load_config, *args, **options)
        if state_dict and not any(isinstance(param, Unread) for param in model.parameters()):
            raise BadCheckpoint(
                f"Cannot load {type(model).__name__}: nothing in {Path(checkpoint_files[0]).parent} is a parameter of it, "
                "which is of another architecture. Load the class that was saved."
            )
        _read_buffers(model)
        return result

    def _unread(self, files: Sequence[Path], index: Mapping[str, Any] | None) -> dict[str, Unread]:
        unread: dict[str, Unread] = {}
        where: dict[str, str] = {}
        for file in files:
            opened = WeightFiles(file)
            for name, values in opened.tensors.items():
                if name in unread:
                    raise BadCheckpoint(f"Cannot load {name}: it is in {file.name} and in a file before it. Keep one of them.")
                unread[name], where[name] = Unread.of(values, name), file.name
            self._loaded.append(opened.digest)
        for name, file_name in (index or {}).get("weight_map", {}).items():
            if where.get(name) != Path(file_name).name:
                raise BadCheckpoint(
                    f"Cannot load {name}: the index says that it is in {file_name}, and it is in {where.get(name, 'no file')}. "
                    "Fetch the files again."
                )
        return unread


def _check(model: Any, load_config: Any) -> None:
    if load_config.hf_quantizer is not None:
        raise ValueError(
            f"Cannot load a quantized {type(model).__name__} for shares: it is quantized as it is read. Load it without "
            "`loading`, and it is whole on all ranks; weights that are trained beside it are sharded."
        )
    devices = {str(device) for device in (load_config.device_map or {}).values()}
    if devices - {"cpu"}:
        raise ValueError(
            f"Cannot load {type(model).__name__} for shares with device_map={load_config.device_map}: its weights are nowhere "
            "until it is sharded. Leave device_map out, and move the model with model.to(device), which reads nothing."
        )


def _read_buffers(model: Any) -> None:
    """Reads the buffers, which are whole on every rank."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if type(buffer) is Unread:
                module._buffers[name] = whole = buffer.whole()
                whole._is_hf_initialized = True  # type: ignore[attr-defined]  # or transformers would initialise it
