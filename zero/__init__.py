"""Sharded training that equals plain PyTorch, on any device that torch has.

    import zero
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=3e-4), stage=2)
    loss = model(x).mean(); loss.backward(); optimizer.step(); optimizer.zero_grad()

    engine, optimizer, loader, scheduler = zero.initialize(model=model, config="ds_config.json")
    loss = engine(x).mean(); engine.backward(loss); engine.step()

The words, each for one idea:

rank            one of the processes that train together
stage           what is sharded: 0 nothing, 1 masters and moments, 2 gradients too, 3 weights too
whole           all of something, as every rank would have it without sharding
share           one rank's part of a bucket
shard           all shares of one rank
slot            a parameter's place on the flat line
bucket          a stretch of the line that is reduced at once
master          the copy of a weight, in the dtype of sums, that the optimizer updates
staging         scratch memory that a bucket is sent from
round           one collective of one bucket
proxy           what `.grad` is while the gradient itself is in shares
window          from one zero_grad to the next: the backwards and edits of one step
micro-step      one of several forwards and backwards that make a step
settle          to agree with the other ranks on the gradients of a window
publish         to make the new masters everybody's weights

The names below are loaded when first used: importing this package imports nothing but itself.
"""

import atexit
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero.checkpoint.export import export as export
    from zero.checkpoint.export import read_export as read_export
    from zero.config.schema import ZeroConfig as ZeroConfig
    from zero.engine.engine import Engine as Engine
    from zero.engine.initialize import initialize as initialize
    from zero.errors import ZeroError as ZeroError
    from zero.graph.backend import as_regions as as_regions
    from zero.graph.backend import compile as compile
    from zero.sequence.attention import ulysses as ulysses
    from zero.sequence.batch import sequence_batch as sequence_batch
    from zero.sequence.host import activations_on_host as activations_on_host
    from zero.sequence.memory import in_chunks as in_chunks
    from zero.sequence.memory import linear_cross_entropy as linear_cross_entropy
    from zero.setup.parts import part as part
    from zero.sharding.load import latest as latest
    from zero.sharding.load import load as load
    from zero.sharding.load_weights import load_weights as load_weights
    from zero.sharding.metrics import MetricsWriter as MetricsWriter
    from zero.sharding.optimizer import ShardedOptimizer as ShardedOptimizer
    from zero.sharding.optimizer import shard as shard
    from zero.sharding.save import save as save
    from zero.tools.verify import verify as verify

_HOME = {
    "Engine": "engine.engine",
    "MetricsWriter": "sharding.metrics",
    "ShardedOptimizer": "sharding.optimizer",
    "ZeroConfig": "config.schema",
    "ZeroError": "errors",
    "activations_on_host": "sequence.host",
    "as_regions": "graph.backend",
    "compile": "graph.backend",
    "export": "checkpoint.export",
    "in_chunks": "sequence.memory",
    "initialize": "engine.initialize",
    "latest": "sharding.load",
    "linear_cross_entropy": "sequence.memory",
    "load": "sharding.load",
    "load_weights": "sharding.load_weights",
    "part": "setup.parts",
    "read_export": "checkpoint.export",
    "save": "sharding.save",
    "sequence_batch": "sequence.batch",
    "shard": "sharding.optimizer",
    "ulysses": "sequence.attention",
    "verify": "tools.verify",
}

__all__ = [
    "Engine", "MetricsWriter", "ShardedOptimizer", "ZeroConfig", "ZeroError", "activations_on_host", "as_regions",
    "compile", "export", "in_chunks", "initialize", "latest", "linear_cross_entropy", "load", "load_weights", "part",
    "read_export", "save", "sequence_batch", "shard", "ulysses", "verify",
]  # fmt: skip


_RENAMED = {"Records": "MetricsWriter"}  # names of the release before; they work, with a warning, in one more release


def __getattr__(name: str) -> object:
    if name in _RENAMED:
        from warnings import warn

        warn(f"zero.{name} is now zero.{_RENAMED[name]}. Use the new name.", DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    if name not in _HOME:
        raise AttributeError(f"module 'zero' has no attribute '{name}'. It has: {', '.join(__all__)}.")
    return getattr(import_module(f"zero.{_HOME[name]}"), name)


def _end() -> None:
    """Tells ranks that wait for this one to shard with them by what error it ended, if torch.distributed is up."""
    if "torch.distributed" in sys.modules and "zero.comm.torch_world" not in sys.modules and hasattr(sys, "last_value"):
        import_module("zero.comm.torch_world").end()


atexit.register(_end)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
