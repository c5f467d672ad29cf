"""The parts of DeepSpeed that are missing here, with what to write instead. A script may import them; using them raises."""

from __future__ import annotations

import sys
from typing import Any

_PIPELINE = "make one nn.Module of the layers, such as an nn.Sequential, which every rank has whole"
_NO_INFERENCE = "there is no inference engine; call the model, or initialize it without an optimizer to run forward"
_NO_TENSOR_PARALLEL = "parameters are sharded over data-parallel ranks only"
_OF_A_SHARE = "shares are cut otherwise here; use the safe_get_full_... or safe_set_full_... function of the same kind"

ABSENT: dict[str, str] = {
    "DeepSpeedConfig": "python -m zero config prints what a file means; zero.ZeroConfig is the configuration itself",
    "DeepSpeedHybridEngine": _NO_INFERENCE,
    "DeepSpeedInferenceConfig": _NO_INFERENCE,
    "DeepSpeedTransformerConfig": "use the model's own layers, or torch.compile",
    "DeepSpeedTransformerLayer": "use the model's own layers, or torch.compile",
    "InferenceEngine": _NO_INFERENCE,
    "OnDevice": 'build the model under torch.device("meta"), or where it is to be',
    "PipelineEngine": _PIPELINE,
    "PipelineModule": _PIPELINE,
    "LayerSpec": _PIPELINE,
    "TiedLayerSpec": _PIPELINE,
    "default_inference_config": _NO_INFERENCE,
    "init_inference": _NO_INFERENCE,
    "replace_transformer_layer": "use the model's own layers, or torch.compile",
    "set_autotp_mode": _NO_TENSOR_PARALLEL,
    "tp_model_init": _NO_TENSOR_PARALLEL,
    "MoE": "write the layer of experts in torch; every rank has all experts, and their gradients are sharded like any other",
    # utils
    "groups": _NO_TENSOR_PARALLEL,
    "safe_get_local_fp32_param": _OF_A_SHARE,
    "safe_get_local_grad": _OF_A_SHARE,
    "safe_get_local_optimizer_state": _OF_A_SHARE,
    "safe_set_local_fp32_param": _OF_A_SHARE,
    "safe_set_local_grad": _OF_A_SHARE,
    "safe_set_local_optimizer_state": _OF_A_SHARE,
    # zero
    "TiledLinear": "use nn.Linear: a weight larger than a bucket is in shares like any other",
    # comm
    "log_summary": "use torch.profiler: nothing is measured by configuration",
    "initialize_mesh_device": _NO_TENSOR_PARALLEL,
    # checkpointing
    "get_cuda_rng_tracker": "torch.utils.checkpoint restores random numbers by itself (preserve_rng_state)",
    "model_parallel_cuda_manual_seed": "seed with torch.manual_seed: ranks do not split a model",
    "model_parallel_reconfigure_tp_seed": "seed with torch.manual_seed: ranks do not split a model",
}


# Modules, by the beginnings of their names.
_MODULES: dict[str, str] = {
    "autotuning": "`python -m zero plan` says what fits",
    "elasticity": "checkpoints load at any number of ranks, and torchrun --nnodes 1:4 starts them",
    "inference": _NO_INFERENCE,
    "launcher": "start ranks with torchrun",
    "linear": "use peft, whose adapters are sharded like any parameters",
    "moe": ABSENT["MoE"],
    "monitor": 'a "tensorboard" block writes records, and zero.MetricsWriter takes them',
    "ops.op_builder": "there are no operators to build",
    "ops": "pass an optimizer of torch or of another package, or name one in the configuration",
    "profiling": "use torch.profiler",
    "runtime.config": ABSENT["DeepSpeedConfig"],
    "runtime.dataloader": "use torch.utils.data.DataLoader with a DistributedSampler, or training_data= of initialize",
    "runtime.engine": "initialize returns the engine; DeepSpeedEngine is its class",
    "runtime.fp16": "initialize returns the optimizer; its loss scale is optimizer.cur_scale",
    "runtime.pipe": _PIPELINE,
    "runtime.zero": "initialize returns the optimizer; weights in shares need no Init and no registering",
    "sequence": _NO_TENSOR_PARALLEL,
    "utils.groups": _NO_TENSOR_PARALLEL,
    "utils.logging": "use logger and log_dist of utils",
    "utils.timer": "use torch.profiler",
}


class _AbsentModules:
    """Comes after all other importers, and says of a missing module what to write instead."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        package, _dot, rest = name.partition(".deepspeed.")
        if package == "zero.compat" and rest:
            known = [beginning for beginning in _MODULES if f"{rest}.".startswith(f"{beginning}.")]
            instead = _MODULES[max(known, key=len)] if known else "see docs/from-deepspeed.md"
            text = f"Cannot import {name}: DeepSpeed's module is not here. {instead[0].upper()}{instead[1:]}."
            raise ModuleNotFoundError(text, name=name)


sys.meta_path.append(_AbsentModules)


class Absent:
    """Stands for something that is not here: it can be imported, and raises where it is called or made."""

    instead: str

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"Cannot use {type(self).__name__} of DeepSpeed: it is not here. {self.instead}.")


def absent(name: str) -> type[Absent]:
    """Returns the class that stands for a missing name."""
    instead = ABSENT[name]
    return type(name, (Absent,), {"instead": instead[0].upper() + instead[1:], "__module__": __name__})
