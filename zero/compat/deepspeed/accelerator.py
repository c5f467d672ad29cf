"""`get_accelerator()`: DeepSpeed's calls on the accelerator that this process uses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import accelerators
from accelerators import Accelerator
from zero.compat.deepspeed.absent import ABSENT, absent

_HOST = "cpu"
_NO_OPS = "there are no operators to build; kernels= chooses how a step computes"
_ABSENT = {
    "create_op_builder": _NO_OPS,
    "get_op_builder": _NO_OPS,
    "op_builder_dir": _NO_OPS,
    "build_extension": _NO_OPS,
    "default_generator": "use torch.default_generator, or a torch.Generator of the device",
    "export_envs": "torchrun hands the environment on",
    "create_graph": "use torch.compile, or the device's own graphs",
    "capture_to_graph": "use torch.compile, or the device's own graphs",
    "replay_graph": "use torch.compile, or the device's own graphs",
    "is_current_stream_capturing": "use torch.compile, or the device's own graphs",
    "pin_memory_alignment": "torch aligns what it pins",
    "unpin_memory": "let go of the tensor",
    "register_host_memory": "use pin_memory, which returns a pinned copy",
    "unregister_host_memory": "let go of the tensor",
    "prefer_triton_grouped_mm": _NO_OPS,
}


def get_accelerator() -> AcceleratorCalls:
    """Returns the accelerator in use, under DeepSpeed's names."""
    return AcceleratorCalls(accelerators.current())


def set_accelerator(accelerator: Any) -> None:
    """Uses another accelerator: one of this library, what `get_accelerator` returned, or an object with DeepSpeed's
    interface."""
    from accelerators.compat.deepspeed import adapt

    if isinstance(accelerator, AcceleratorCalls):
        accelerator = accelerator.own
    accelerators.use(accelerator if isinstance(accelerator, Accelerator) else adapt(accelerator))


class AcceleratorCalls:
    """An accelerator of this library behind DeepSpeed's interface; `own` is that accelerator."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.own = accelerator

    def __repr__(self) -> str:
        return f"AcceleratorCalls({self.own!r})"

    @property
    def _name(self) -> str:
        return self.own.name

    def __getattr__(self, name: str) -> Any:
        if name in _ABSENT:
            raise NotImplementedError(f"Cannot use {name} of DeepSpeed's accelerator: it is not here. {_ABSENT[name]}.")
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}. Ask the accelerator itself, accelerators.current(), or "
            f"torch.get_device_module({self.own.name!r})."
        )

    # which device ------------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        return self.own.is_available()

    def is_synchronized_device(self) -> bool:
        return self.own.is_synchronous

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def device_name(self, device_index: int | None = None) -> str:
        return self.own.name if device_index is None or self.own.name == _HOST else f"{self.own.name}:{device_index}"

    def device(self, device_index: int | None = None) -> contextlib.AbstractContextManager[Any]:
        """Returns a block for `with`, inside which this device is the current one."""
        return self._at(device_index)

    @contextlib.contextmanager
    def _at(self, index: int | None) -> Any:
        before = self.own.current_index()
        if index is not None:
            self.own.set_index(index)
        try:
            yield
        finally:
            self.own.set_index(before)

    def set_device(self, device_index: int) -> None:
        """Makes a device the current one. A CPU is one device for all ranks of a host, so that nothing is done there."""
        if self.own.name != _HOST:
            self.own.set_index(device_index)

    def current_device(self) -> int:
        return self.own.current_index()

    def current_device_name(self) -> str:
        return self.device_name(self.own.current_index())

    def device_count(self) -> int:
        return self.own.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        self.own.synchronize(device_index)

    # random numbers ----------------------------------------------------------------------------------------------

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> None:
        self.own.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        states = self.own.rng_state(device_index)
        return states.get(self.own.name, states[_HOST])

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        self.own.set_rng_state({_HOST: torch.get_rng_state(), self.own.name: new_state}, device_index)

    # order -------------------------------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        """The device's class of streams; None if it has none."""
        return getattr(self.own.module, "Stream", None) if self._has_streams else None

    @property
    def Event(self) -> Any:
        """The device's class of events; None if it has none."""
        return getattr(self.own.module, "Event", None) if self._has_streams else None

    @property
    def _has_streams(self) -> bool:
        return self.own.name != _HOST

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if stream is None else self.own.in_stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return self.own.current_stream(device_index)

    default_stream = current_stream

    # memory ------------------------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        self.own.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self.own.memory(device_index).allocated or 0

    memory_reserved = memory_cached = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self.own.memory(device_index).peak or 0

    max_memory_reserved = max_memory_cached = max_memory_allocated

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self.own.reset_peak_memory(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        reading = self.own.memory(device_index)
        return {"allocated_bytes.all.current": reading.allocated or 0, "allocated_bytes.all.peak": reading.peak or 0}

    def total_memory(self, device_index: int | None = None) -> int | None:
        return self.own.memory(device_index).total

    def available_memory(self, device_index: int | None = None) -> int | None:
        return self.own.memory(device_index).available

    # numbers -----------------------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        return self.own.supports(torch.bfloat16)

    def is_fp16_supported(self) -> bool:
        return self.own.supports(torch.float16)

    def is_fp64_supported(self) -> bool:
        return self.own.supports(torch.float64)

    def supported_dtypes(self) -> list[torch.dtype]:
        return list(self.own.supported_dtypes())

    def _tensor(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        return partial(torch.tensor, dtype=dtype, device=self.own.device())

    BFloat16Tensor = property(lambda self: self._tensor(torch.bfloat16))
    HalfTensor = property(lambda self: self._tensor(torch.float16))
    FloatTensor = property(lambda self: self._tensor(torch.float32))
    DoubleTensor = property(lambda self: self._tensor(torch.float64))
    ByteTensor = property(lambda self: self._tensor(torch.uint8))
    IntTensor = property(lambda self: self._tensor(torch.int32))
    LongTensor = property(lambda self: self._tensor(torch.int64))

    # the rest ----------------------------------------------------------------------------------------------------

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        return self.own.pin(tensor)

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
        return self.own.pin(torch.empty(*size, dtype=dtype, device=device))

    def pin_empty_like(self, tensor: torch.Tensor, device: Any = "cpu", dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.own.pin(torch.empty_like(tensor, dtype=dtype, device=device))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.own.name

    def communication_backend_name(self) -> str:
        return self.own.communication_backend

    def get_compile_backend(self) -> str:
        return self.own.compile_backend

    def set_compile_backend(self, backend: str) -> None:
        self.own.compile_backend = backend

    def visible_devices_envs(self) -> list[str]:
        variable = self.own.visible_devices_variable
        return [] if variable is None else [variable]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Does nothing: torch.profiler shows what runs."""

    def range_pop(self, domain: Any = None) -> None:
        """Does nothing."""

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        callback()

    def is_triton_supported(self) -> bool:
        return False


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        return absent(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. docs/from-deepspeed.md has what it is called here.")
