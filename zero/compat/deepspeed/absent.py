"""The parts of DeepSpeed that are missing here, with what to write instead. A script may import them; using them raises."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

_VERSION = "0.19.8"  # the version of DeepSpeed whose names these are

_SEQUENCES = "call zero.ulysses(mesh, model) and zero.sequence_batch, as docs/long-sequences.md has it"
_PIPELINE = "make one nn.Module of the layers, such as an nn.Sequential, which every rank has whole"
_NO_INFERENCE = "there is no inference engine; call the model, or initialize it without an optimizer to run forward"
_NO_TENSOR_PARALLEL = "torch's parallelize_module, or a plan of transformers, cuts layers before zero.shard"
_ROLLOUT = "generate with the model itself, or with an engine for serving that weights are sent to"
_DEVICE = "another device is added by an entry point of accelerators, as docs/accelerators.md says"
_UNIVERSAL = "checkpoints load at any number of ranks, and python -m zero import makes one of DeepSpeed's"
_SPARSE = "gradients are dense here; make embeddings with sparse=False"
_EXACT = "the safe_get_full_... functions give a parameter's exact values"
_EXPERTS = "deepspeed.moe.layer.MoE has it inside; another layer is written in torch, as examples/experts.py is, with zero.part"
_FREE = "leave it out: weights in shares need no Init and no registering, and are whole wherever they are read"
_OF_A_SHARE = "shares are cut otherwise here; use the safe_get_full_... or safe_set_full_... function of the same kind"

ABSENT: dict[str, str] = {
    "DeepSpeedAccelerator": _DEVICE,
    "DeepSpeedCheckpoint": _UNIVERSAL,
    "DeepSpeedConfig": "python -m zero config prints what a file means; zero.ZeroConfig is the configuration itself",
    "DeepSpeedHybridEngine": _NO_INFERENCE,
    "DeepSpeedInferenceConfig": _NO_INFERENCE,
    "DeepSpeedTransformerConfig": "use the model's own layers, or torch.compile",
    "DeepSpeedTransformerLayer": "use the model's own layers, or torch.compile",
    "DeepSpeedDataLoader": "use training_data= of initialize, or engine.deepspeed_io",
    "DeepSpeedOptimizerCallable": "annotate with collections.abc.Callable: initialize takes a function of the parameters",
    "DeepSpeedSchedulerCallable": "annotate with collections.abc.Callable: initialize takes a function of the optimizer",
    "DualPipeVEngine": _PIPELINE,
    "DualPipeVModule": _PIPELINE,
    "InferenceEngine": _NO_INFERENCE,
    "OnDevice": 'build the model under torch.device("meta"), or where it is to be',
    "PipelineEngine": _PIPELINE,
    "PipelineModule": _PIPELINE,
    "LayerSpec": _PIPELINE,
    "TiedLayerSpec": _PIPELINE,
    "default_inference_config": _NO_INFERENCE,
    "init_inference": _NO_INFERENCE,
    "replace_transformer_layer": "use the model's own layers, or torch.compile",
    "set_optimizer_flags": "matrices are told from the rest by their names; set use_muon on a parameter for another answer",
    "set_autotp_mode": _NO_TENSOR_PARALLEL,
    "tp_model_init": _NO_TENSOR_PARALLEL,
    # utils
    "safe_get_local_fp32_param": _OF_A_SHARE,
    "safe_get_local_grad": _OF_A_SHARE,
    "safe_get_local_optimizer_state": _OF_A_SHARE,
    "safe_set_local_fp32_param": _OF_A_SHARE,
    "safe_set_local_grad": _OF_A_SHARE,
    "safe_set_local_optimizer_state": _OF_A_SHARE,
    "get_full_hp_param": _EXACT,
    "link_hp_params": _EXACT,
    "lazy_init_hp_params_optimizer_state": _EXACT,
    "map_to_flat_opt_states": _EXACT,
    "z3_leaf_parameter": "leave it out: no module is a leaf here",
    "LoggerFactory": "use logging.getLogger",
    "print_configuration": "python -m zero config prints what a file means",
    "print_dist": "use log_dist, or print on rank 0",
    "print_json_dist": "write it with json on rank 0",
    # zero
    "TiledLinearReturnBias": "use nn.Linear: a weight larger than a bucket is in shares like any other",
    "unwrap_model_for_generation": "leave it out: generate runs on sharded weights, as long on each rank as it likes",
    "TiledLinear": "use nn.Linear: a weight larger than a bucket is in shares like any other",
    # comm
    "TorchBackend": "use torch.distributed, whose functions deepspeed.comm has",
    "inference_all_reduce": "use all_reduce",
    "configure": "use torch.profiler: nothing is measured by configuration",
    "log_summary": "use torch.profiler: nothing is measured by configuration",
    "initialize_mesh_device": _NO_TENSOR_PARALLEL,
    # runtime.utils
    "CheckOverflow": "initialize returns the optimizer, whose overflow says it",
    "DummyOptim": "initialize without an optimizer makes an engine that runs forward",
    "PartitionedTensor": _NO_TENSOR_PARALLEL,
    "partition_balanced": _PIPELINE,
    "partition_uniform": _PIPELINE,
    "get_grad_norm": "call engine.get_global_grad_norm(), or torch.nn.utils.clip_grad_norm_, which returns it",
    "get_weight_norm": "take torch.nn.utils.get_total_norm of the parameters, which are whole wherever they are read",
    "call_to_str": "write the line yourself: it is DeepSpeed's own helper",
    "memory_status": "use see_memory_usage",
    "noop_decorator": "write it yourself: it is DeepSpeed's own helper",
    "required_torch_version": "compare torch.__version__",
    "bwc_tensor_model_parallel_rank": _NO_TENSOR_PARALLEL,
    "is_model_parallel_parameter": _NO_TENSOR_PARALLEL,
    # checkpointing
    "get_cuda_rng_tracker": "torch.utils.checkpoint restores random numbers by itself (preserve_rng_state)",
    "model_parallel_cuda_manual_seed": "seed with torch.manual_seed: ranks do not split a model",
    "model_parallel_reconfigure_tp_seed": "seed with torch.manual_seed: ranks do not split a model",
}


# The modules, by the beginnings of their names.
_MODULES: dict[str, str] = {
    **dict.fromkeys((f"accelerator.{kind}_accelerator" for kind in ("abstract", "cuda", "cpu", "hpu", "mps", "npu", "xpu")),
                    _DEVICE),
    **dict.fromkeys(("checkpoint.constants", "checkpoint.deepspeed_checkpoint", "checkpoint.ds_to_universal",
                     "checkpoint.universal_checkpoint"), _UNIVERSAL),
    **dict.fromkeys(("comm.backend", "comm.ccl", "comm.constants", "comm.reduce_op", "comm.torch", "comm.utils"),
                    "deepspeed.comm hands on what torch.distributed has"),
    "compile": "torch.compile and zero.compile take no passes of DeepSpeed's",
    "env_report": "python -m accelerators prints what there is",
    "git_version_info": "python -m accelerators prints what there is",
    "compression": "it changes the numbers; quantise or prune the model itself, with torchao for instance",
    "io": "zero.save writes checkpoints",
    "model_implementations": _NO_INFERENCE,
    "module_inject": _NO_INFERENCE,
    "nvme": "homes= says what lives on a disk; python -m zero plan says how fast it must be",
    "nebula": "zero.save(async_save=True) writes while training goes on",
    "runtime.activation_checkpointing": "use deepspeed.checkpointing, or torch.utils.checkpoint",
    "runtime.bf16_optimizer": "initialize returns the optimizer",
    "runtime.checkpoint_engine": "zero.save(async_save=True) writes while training goes on",
    "runtime.base_optimizer": "initialize returns the optimizer",
    "runtime.compiler": "torch.compile and zero.compile compile",
    "runtime.config_utils": ABSENT["DeepSpeedConfig"],
    "runtime.csr_tensor": _SPARSE,
    "runtime.domino": _NO_TENSOR_PARALLEL,
    "runtime.rlhf": _ROLLOUT,
    "runtime.rollout": _ROLLOUT,
    "runtime.sequence_parallel": _SEQUENCES,
    "runtime.sparse_tensor": _SPARSE,
    "runtime.state_dict_factory": "load whole weights with zero.load_weights",
    "runtime.torch_autocast": "write torch_autocast in the configuration, or use torch.autocast",
    "runtime.weight_quantizer": "quantise the model itself, with torchao for instance",
    "runtime.comm": "reduce_dtype= sends fewer bytes",
    "runtime.compression": "reduce_dtype= sends fewer bytes",
    "runtime.data_pipeline": "your own loader and model choose data and layers",
    "runtime.eigenvalue": "compute it with torch.func",
    **dict.fromkeys(("runtime.hybrid_engine", "runtime.hybrid_engine_graph"), _NO_INFERENCE),
    "runtime.chunked_cross_entropy": "use the loss of the model, or of a package of kernels such as liger-kernel",
    "runtime.keep_in_fp32": "data_types.keep_in_fp32_modules of the file says which stay",
    "runtime.model_checkpointing": "zero.save(async_save=True) writes while training goes on",
    "runtime.progressive_layer_drop": "drop layers in the model's own forward",
    "runtime.quantize": "quantise the model itself, with torchao for instance",
    "runtime.superoffload": "offload_optimizer steps on the host",
    "runtime.swap_tensor": "homes= says what lives on a disk",
    "runtime.tensor_parallel": _NO_TENSOR_PARALLEL,
    "runtime.zenflow": "offload_optimizer steps on the host",
    "runtime.constants": "write the keys as they are in the file",
    "utils.bwc": _NO_TENSOR_PARALLEL,
    "utils.comms_logging": "use torch.profiler",
    "utils.init_on_device": ABSENT["OnDevice"],
    "utils.mixed_precision_linkage": _EXACT,
    "utils.groups": _NO_TENSOR_PARALLEL,
    "utils.numa": "bind ranks to cores with the launcher, or numactl",
    "utils.torch": "compare torch.__version__",
    "utils.tensor_fragment": _EXACT,
    "utils.types": "pass torch's own functions",
    "utils.debug": "names come from model.named_parameters()",
    "utils.module_utils": "deepspeed.utils has recursive_getattr and recursive_setattr",
    "utils.zero_to_torch": "zero.load_weights and deepspeed.utils.zero_to_fp32 read checkpoints",
    "autotuning": "`python -m zero plan` says what fits",
    "elasticity": "checkpoints load at any number of ranks, and torchrun --nnodes 1:4 starts them",
    "inference": _NO_INFERENCE,
    "launcher": "start ranks with torchrun",
    "linear": "use peft, whose adapters are sharded like any parameters",
    "moe": _EXPERTS,
    "ops.lamb": "initialize takes a LAMB of another package, such as pytorch_optimizer's Lamb",
    "monitor": 'a "tensorboard" block writes records, and zero.MetricsWriter takes them',
    "ops.op_builder": "there are no operators to build",
    "ops": "pass an optimizer of torch or of another package, or name one in the configuration",
    "profiling": "use torch.profiler",
    "runtime.config": ABSENT["DeepSpeedConfig"],
    "runtime.engine": "initialize returns the engine; DeepSpeedEngine is its class",
    "runtime.dataloader": "use torch.utils.data.DataLoader with a DistributedSampler, or training_data= of initialize",
    "runtime.fp16": "initialize returns the optimizer; its loss scale is optimizer.cur_scale",
    "runtime.pipe": _PIPELINE,
    "runtime.zero.config": ABSENT["DeepSpeedConfig"],
    "runtime.zero.stage3": "initialize returns the optimizer; python -m zero plan says what fits",
    "runtime.zero.stage_1_and_2": "initialize returns the optimizer; python -m zero plan says what fits",
    "runtime.zero": "initialize returns the optimizer; weights in shares need no Init and no registering",
    "runtime.zero.partition_parameters": _FREE,
    "runtime.zero.utils": _FREE,
    "sequence": _SEQUENCES,
}


class _AbsentModules(Loader):
    """Comes after all other importers: a module of DeepSpeed's that is not here can be imported, with whatever a script takes
    from it, and what it takes says when it is used what to write instead."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        package, _dot, rest = name.partition(".deepspeed.")
        if package != "zero.compat" or not rest:
            return None
        if _instead_of(rest) is None:
            raise ModuleNotFoundError(
                f"Cannot import {name}: DeepSpeed {_VERSION} has no such module, or one of those that are not here. See "
                "docs/from-deepspeed.md.",
                name=name,
            )
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves the making of the module to Python."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = rest_of(module.__name__)


def rest_of(module: str, has_modules: bool = False, hint: str = "") -> Callable[[str], type[Absent]]:
    """Returns the `__getattr__` of a module whose other names are missing. If other modules may lie in it, a name in small
    letters that ABSENT has not is left to the import of a module. `hint` ends the error of a name that nobody knows."""
    instead = _instead_of(module.partition(".deepspeed.")[2])

    def absent_name(name: str) -> type[Absent]:
        is_no_name = name.startswith("__") or (has_modules and name not in ABSENT and not name[:1].isupper())
        if is_no_name or (name not in ABSENT and instead is None):
            raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
        return absent(name, ABSENT.get(name, instead))

    return absent_name


def is_known(module: str) -> bool:
    """Returns whether DeepSpeed has a module of this name that is not here."""
    return _instead_of(module) is not None


def _instead_of(module: str) -> str | None:
    """Returns what to write instead of a module, by the longest known beginning of its name; None for an unknown one."""
    known = [beginning for beginning in _MODULES if f"{module}.".startswith(f"{beginning}.")]
    return _MODULES[max(known, key=len)] if known else None


sys.meta_path.append(_AbsentModules())


class _AbsentType(type):
    """Says what to write instead if an attribute or an entry of what is missing is asked for. A name in small letters may be a
    module that no import named; its names in capitals are missing classes, as they are after an import."""

    instead: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        if name[:1].isupper() and cls.__name__.islower():
            return absent(name, cls.instead)
        raise AttributeError(f"Cannot use {cls.__name__}.{name} of DeepSpeed: it is not here. {cls.instead}.")

    def _refuse(cls, *_: Any) -> NoReturn:
        raise NotImplementedError(f"Cannot use {cls.__name__} of DeepSpeed: it is not here. {cls.instead}.")

    __contains__ = __iter__ = __getitem__ = __len__ = _refuse


class Absent(metaclass=_AbsentType):
    """Stands for something that is not here: it can be imported, and raises when it is called or made."""

    instead: str

    def __init__(self, *_: Any, **__: Any) -> None:
        type(self)._refuse()


def absent(name: str, instead: str | None = None) -> type[Absent]:
    """Returns the class that stands for a missing name, and says to write `instead`, or what ABSENT has."""
    instead = ABSENT[name] if instead is None else instead
    return type(name, (Absent,), {"instead": instead[0].upper() + instead[1:], "__module__": __name__})
