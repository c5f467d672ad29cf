"""The Accelerator: everything that is asked of a device, written once over torch's own device modules.

    accelerator = accelerators.current()
    x = torch.ones(3, device=accelerator.device())
    accelerator.memory().peak                        # bytes, or None if the device does not say
    with accelerator.in_stream(accelerator.new_stream()):
        y = x * 2                                    # on a device without streams, in its one queue

    class MyDevice(Accelerator):                     # a backend names its device, and overrides what is different there
        name = "mydev"
        has_streams = False

    accelerators.register("mydev", MyDevice)

Torch has a module for every device (`torch.xpu`, `torch.mps`, a plug-in's own) and, over all of them, `torch.accelerator`. Each
lacks functions that the other has. So a question, such as `device_count`, goes to the module first, `torch.xpu.device_count()`,
then to `torch.accelerator`, and gets a harmless answer if neither has the function: see `_ask`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from functools import cached_property, partial
from types import ModuleType
from typing import Any, Literal

import torch

from accelerators.memory import MemoryReading, memory_cap
from accelerators.staged import backend_for
from accelerators.streams import Event, InOrderEvent, InOrderStream, Stream

logger = logging.getLogger("accelerators")

FLOATING_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# The names that functions of a device module have in torch.accelerator, the newest first.
_GENERIC_NAMES = {"current_device": ("current_device_index", "current_device_idx"),
                  "set_device": ("set_device_index", "set_device_idx"), "mem_get_info": ("get_memory_info",)}  # fmt: skip
_ABSENT = object()  # the answer if torch has no such function


class Accelerator:
    """A type of device. Construct it freely: it does not touch the device before its first call.

    A subclass names its device in `name` and says in class attributes what torch cannot tell; the rest works through torch.
    Every index is an int or None, and None means the current device of this thread.
    """

    name: str = ""
    """The name of the device in torch, such as "cuda"."""
    visible_devices_variable: str | None = None
    """The environment variable that hides devices from a process."""
    compile_backend: str = "aot_eager"
    """The backend of torch.compile; eager kernels if no compiler serves the device."""
    has_dlpack: bool = False
    """True if torch.from_dlpack can give any stretch of the device's memory a storage of its own."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or type(self).name
        if not self.name:
            raise TypeError(f"Cannot make a {type(self).__name__}: the class has no name. Set its class attribute `name`.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @cached_property
    def communication_backend(self) -> str:
        """The backend of torch.distributed for this device: its own if it has one, else "staged", which serves every device
        through the host. It is found out once; a subclass may name one as a class attribute."""
        return backend_for(self)

    # which device ------------------------------------------------------------------------------------------------

    def unavailable_reason(self) -> str | None:
        """Returns why this device is unusable here, or None if it works. It must not initialise the device."""
        if self.module is None:
            return f"torch has no device module torch.{self.name} (torch {torch.__version__})"
        if self._ask("_is_in_bad_fork", default=False):
            return f"torch.{self.name} was in use before this process was forked, and a device cannot be shared that way"
        if not self._ask("is_available", default=True):
            return f"torch.{self.name}.is_available() is False (torch {torch.__version__})"
        if self.device_count() == 0:
            return f"torch.{self.name} has 0 devices (torch {torch.__version__})"
        return None

    def is_available(self) -> bool:
        """Returns True if the device works here."""
        return self.unavailable_reason() is None

    def device_count(self) -> int:
        """Returns the number of devices that this process sees."""
        return int(self._ask("device_count", default=0))

    def device(self, index: int | None = None) -> torch.device:
        """Returns the torch.device of an index, to create tensors on."""
        return torch.device(self.name, self._index(index))

    def identity(self, index: int | None = None) -> str:
        """Returns what tells a device from the others of its host, alike in all processes, however each numbers them."""
        index = self._index(index)
        uuid = getattr(self._ask("get_device_properties", index), "uuid", None)
        visible = os.environ.get(self.visible_devices_variable or "", "").split(",")
        seen = visible[index].strip() if index < len(visible) else ""
        return str(uuid or seen or index)

    def current_index(self) -> int:
        """Returns the index of the current device of this thread."""
        index = self._ask("current_device", default=0)
        return index if isinstance(index, int) else 0  # torch.cpu answers "cpu"

    def set_index(self, index: int) -> None:
        """Makes `index` the current device of this thread; a new thread starts at device 0."""
        self._ask("set_device", self._check_index(index))

    # memory ------------------------------------------------------------------------------------------------------

    def memory(self, index: int | None = None) -> MemoryReading:
        """Reads the memory of a device; the figures are at most what ACCELERATOR_MEMORY allows."""
        return self.read_memory(self._index(index)).capped(memory_cap())

    def read_memory(self, index: int) -> MemoryReading:
        """Reads the figures that the device itself reports. Backends override this method."""
        free, total = self._ask("mem_get_info", index, default=(None, None))
        allocated = self._ask("memory_allocated", index)
        reserved = self._ask("memory_reserved", index)
        if free is not None and reserved is not None and allocated is not None:
            free += reserved - allocated  # torch's cache of free blocks can be allocated at once
        return MemoryReading(total, free, allocated, self._ask("max_memory_allocated", index), self._peak_since(index))

    def reset_peak_memory(self, index: int | None = None) -> None:
        """Begins a new peak. If the device cannot, `peak_since` stays at "process start"."""
        index = self._index(index)
        with contextlib.suppress(RuntimeError):  # some devices raise it if they have no such function
            if self._ask("reset_peak_memory_stats", index, default=_ABSENT) is not _ABSENT:
                self._peaks_reset.add(index)

    def _peak_since(self, index: int) -> Literal["last reset", "process start"]:
        return "last reset" if index in self._peaks_reset else "process start"

    def with_own_storage(self, stretch: torch.Tensor) -> torch.Tensor:
        """Returns a tensor whose storage is the memory of a one-dimensional `stretch` alone; it keeps that memory alive.

        Tools take tensors of one storage for parts of one weight, and `torch.save` writes whole storages. If the device
        cannot make such a tensor, `stretch` itself is returned, and a model's state_dict holds copies.
        """
        if not self.has_dlpack:
            return stretch
        with torch.inference_mode(False):  # an inference tensor could not be a parameter's memory
            tensor: torch.Tensor = torch.from_dlpack(stretch)  # type: ignore[attr-defined]
            return tensor

    def empty_cache(self) -> None:
        """Returns the memory of torch's cache to the device."""
        self._ask("empty_cache")

    # order -------------------------------------------------------------------------------------------------------

    @property
    def is_synchronous(self) -> bool:
        """True if work is done when the call that issued it returns, so that nobody has to wait."""
        return not self.has_streams and not (hasattr(self.module, "synchronize") or self._is_torch_accelerator())

    @property
    def has_streams(self) -> bool:
        """True if streams and events order the device's work, False if one queue does. A subclass sets it to False if its
        device has no streams, or its streams cannot wait for one another."""
        return self._streams is not None

    def synchronize(self, index: int | None = None) -> None:
        """Waits until all work issued to a device is done."""
        self._ask("synchronize", self._index(index))

    def new_stream(self, index: int | None = None) -> Stream:
        """Makes a stream. On a device without streams it stands for the one queue, so code needs no second way."""
        if self._streams is None or not self.has_streams:
            return self._in_order_stream(self._index(index))
        stream: Stream = self._streams.Stream(device=self.device(index))
        return stream

    def current_stream(self, index: int | None = None) -> Stream:
        """Returns the stream that this thread issues work to."""
        if self._streams is None or not self.has_streams:
            return self._in_order_stream(self._index(index))
        # The current device is asked without its index, as torch answers faster.
        stream: Stream = self._ask("current_stream", *([] if index is None else [self._check_index(index)]))
        return stream

    def new_event(self, timing: bool = False) -> Event:
        """Makes an event, which marks a place in a stream; with `timing`, also when the device came to it."""
        if self._streams is None or not self.has_streams:
            return InOrderEvent(self.synchronize)
        of_device = {"device": self.device()} if self._streams is torch else {}
        event: Event = self._streams.Event(enable_timing=timing, **of_device)
        return event

    @contextlib.contextmanager
    def in_stream(self, stream: Stream) -> Iterator[Stream]:
        """Issues the work of a `with` block to `stream`. Entering and leaving order nothing."""
        enter = getattr(self.module, "stream", None)
        if isinstance(stream, InOrderStream):
            yield stream
        elif enter is not None:
            with enter(stream):
                yield stream
        else:
            index, before = self.current_index(), self.current_stream(getattr(stream, "device_index", None))
            torch.accelerator.set_stream(stream)  # type: ignore[arg-type]
            try:
                yield stream
            finally:
                torch.accelerator.set_stream(before)  # type: ignore[arg-type]
                self.set_index(index)  # set_stream makes the stream's device the current one

    # numbers -----------------------------------------------------------------------------------------------------

    def supports(self, dtype: torch.dtype) -> bool:
        """Returns True if arithmetic in `dtype` gives right numbers on this device."""
        if dtype not in self._dtype_answers:
            self._dtype_answers[dtype] = self._probe_dtype(dtype)
        return self._dtype_answers[dtype]

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        """Returns the floating dtypes that work here."""
        return tuple(dtype for dtype in FLOATING_DTYPES if self.supports(dtype))

    def preferred_dtype(self) -> torch.dtype:
        """Returns the dtype in which a model is small and fast here. Nothing is cast to it unless the user asks."""
        return torch.bfloat16 if self.supports(torch.bfloat16) else torch.float32

    def norm_dtype(self) -> torch.dtype:
        """Returns the dtype in which squares are summed: fp64 if the device has it, else fp32."""
        return torch.float64 if self.supports(torch.float64) else torch.float32

    def manual_seed(self, seed: int) -> None:
        """Seeds the host and every device of this type."""
        torch.manual_seed(seed)
        self._ask("manual_seed_all", seed)

    def rng_state(self, index: int | None = None) -> dict[str, torch.Tensor]:
        """Returns the random state of the host, and of the device if it has one, by name."""
        states = {"cpu": torch.get_rng_state()}
        state = self._ask("get_rng_state", self._index(index))
        if state is not None:
            states[self.name] = state
        return states

    def set_rng_state(self, states: dict[str, torch.Tensor], index: int | None = None) -> None:
        """Restores what `rng_state` returned. States of other types of devices are ignored."""
        torch.set_rng_state(states["cpu"])
        if self.name in states:
            self._ask("set_rng_state", states[self.name], self._index(index))

    # host memory -------------------------------------------------------------------------------------------------

    @cached_property
    def can_pin(self) -> bool:
        """True if host memory can be pinned for this device. It is tried once; False that a user sets turns pinning off."""
        try:
            return torch.empty(1, pin_memory=True).is_pinned()
        except RuntimeError as error:
            logger.warning("Host memory cannot be pinned for %s, pageable memory serves instead: %s", self.name, error)
            return False

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of `tensor` in pinned host memory, or `tensor` itself if it is pinned already or cannot be."""
        if tensor.device.type != "cpu":
            raise ValueError(f"Cannot pin a tensor on {tensor.device}: only host memory is pinned. Pass a CPU tensor.")
        if not self.can_pin or tensor.numel() == 0 or tensor.is_pinned():
            return tensor
        try:
            return tensor.pin_memory()
        except RuntimeError as error:
            logger.warning("%d bytes of host memory could not be pinned, pageable memory serves: %s", tensor.nbytes, error)
            self.can_pin = False  # so this is the only warning, and the last try
            return tensor

    # how torch is asked ------------------------------------------------------------------------------------------

    @property
    def module(self) -> ModuleType | None:
        """Torch's module for this device type, or None if torch has none."""
        try:
            module: ModuleType = torch.get_device_module(self.name)
        except RuntimeError:
            return None
        return module

    def forget_answers(self) -> None:
        """Forgets the answers that are kept, so that the device is asked again."""
        answers = "can_pin", "communication_backend", "_peaks_reset", "_dtype_answers", "_streams", "_has_generic_streams"
        for answer in answers:
            vars(self).pop(answer, None)

    def _ask(self, question: str, *arguments: Any, default: Any = None) -> Any:
        """Calls torch's function of that name: the device module's, else torch.accelerator's; without either, returns
        `default`."""
        function = getattr(self.module, question, None)
        if function is not None:
            with contextlib.suppress(NotImplementedError):
                return function(*arguments)
        # torch.accelerator raises RuntimeError if a device lacks the function. Synchronising is the exception: its
        # RuntimeError is of the device's work that failed, and must reach the caller.
        absent = NotImplementedError if question == "synchronize" else RuntimeError
        for name in _GENERIC_NAMES.get(question, (question,)):
            generic = getattr(torch.accelerator, name, None)
            if generic is not None and self._is_torch_accelerator():
                with contextlib.suppress(absent):
                    return generic(*arguments)
        return default

    def _index(self, index: int | None) -> int:
        return self.current_index() if index is None else self._check_index(index)

    def _check_index(self, index: int) -> int:
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(
                f"Cannot take device {index!r} of {self.name}: an index is not a {type(index).__name__}. Pass an int."
            )
        count = self.device_count()
        if not 0 <= index < count:
            advice = f"Pass 0 to {count - 1}" if count else "python -m accelerators shows why"
            raise ValueError(
                f"Cannot take device {index} of {self.name}: {count} {'is' if count == 1 else 'are'} visible. {advice}."
            )
        return index

    def _is_torch_accelerator(self) -> bool:
        current = torch.accelerator.current_accelerator()
        return current is not None and current.type == self.name

    @cached_property
    def _streams(self) -> ModuleType | None:
        """The module that has Stream and Event: the device's own, torch, or None. Both are needed, and a way to make a stream
        current."""
        module = self.module
        if hasattr(module, "Stream") and hasattr(module, "Event"):
            if hasattr(module, "current_stream") and hasattr(module, "stream"):
                return module
            if self._is_torch_accelerator():  # torch.accelerator makes its streams current
                return module
        return torch if self._has_generic_streams else None

    @cached_property
    def _has_generic_streams(self) -> bool:
        if not self._is_torch_accelerator() or not hasattr(torch.accelerator, "set_stream"):
            return False
        try:
            torch.Stream(device=self.device())
            torch.Event(device=self.device())
            torch.accelerator.current_stream(self.current_index())
        except RuntimeError:
            return False
        return True

    def _in_order_stream(self, index: int) -> InOrderStream:
        return self._in_order_streams.setdefault(index, InOrderStream(partial(self.synchronize, index)))

    @cached_property
    def _in_order_streams(self) -> dict[int, InOrderStream]:
        return {}

    @cached_property
    def _peaks_reset(self) -> set[int]:
        return set()

    @cached_property
    def _dtype_answers(self) -> dict[torch.dtype, bool]:
        return {}

    def _probe_dtype(self, dtype: torch.dtype) -> bool:
        """Multiplies two matrices in a dtype on the device, and compares with what is known."""
        # Every dtype holds small integers exactly, so a device that computes in it gives exactly these numbers.
        try:
            matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=self.device()).to(dtype)
            if dtype.is_floating_point:
                actual, expected = matrix @ matrix + matrix, [[8, 12], [18, 26]]
            else:
                actual, expected = matrix * matrix + matrix, [[2, 6], [12, 20]]
            return bool(actual.tolist() == expected)
        # Some devices raise TypeError for a dtype that they lack. A torch that is built without the device raises
        # AssertionError.
        except (RuntimeError, TypeError, AssertionError):
            return False
