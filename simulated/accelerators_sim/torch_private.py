"""Every private name of torch that the simulated device uses, and how.

Torch lets Python write a device ("PrivateUse1") with two exceptions: a tensor cannot be made on another index than 0, and the
guard that C++ asks for the number of devices and the current one always answers 1 and 0. A DLPack capsule solves the first, and
exchanged entries in the guard's table of virtual functions the second.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

NAME = "sim"
# Above every other key; torch keeps it for such uses, and nothing turns it on by default.
WATCH_KEY = "TESTING_ONLY_GenericMode"

_C: Any = torch._C

# Written out one by one, so that a torch without one of them is told apart from a mistake of ours.
_NEEDED = (
    "torch._C._acc.DeviceGuard",
    "torch._C._acc.PrivateUse1Hooks",
    "torch._C._acc.register_python_privateuseone_device_guard",
    "torch._C._acc.register_python_privateuseone_hook",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._autograd.DeviceType.PrivateUse1",
    "torch._C._AutoDispatchBelowADInplaceOrView",
    "torch._C._construct_storage_from_data_pointer",
    "torch._C._current_autograd_node",
    "torch._C._current_graph_task_id",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._dispatch_tls_set_dispatch_key_included",
    "torch._C._ExcludeDispatchKeyGuard",
    "torch._C._should_allow_numbers_as_tensors",
    "torch._C._from_dlpack",
    "torch._C._parse_dispatch_key",
    "torch._C._get_privateuse1_backend_name",
    "torch.UntypedStorage.clone",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.library.Library.fallback",
    "torch.library.get_kernel",
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend",
)

CPU_KEYS = _C.DispatchKeySet(_C.DispatchKey.CPU)

below_autograd: Callable[[], Any] = getattr(_C, "_AutoDispatchBelowADInplaceOrView", lambda: None)
current_node: Callable[[], Any] = getattr(_C, "_current_autograd_node", lambda: None)


def why_not() -> str | None:
    """Returns why this torch cannot carry the simulated device, or None if it can."""
    if missing := missing_names():
        return f"torch {torch.__version__} lacks {', '.join(missing)}; the simulated device was written for torch 2.13"
    if sys.platform == "win32":
        return "the simulated device exchanges functions of torch's device guard, whose layout it knows on Linux and macOS only"
    if not _guard_header().is_file():
        return f"{_guard_header().name} is missing from torch's include folder, and with it the layout of the device guard"
    taken = _C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        return f"torch has room for one plug-in device a process, and '{taken}' took it"
    if getattr(torch, NAME, None) is not None:
        return f"torch.{NAME} is something else already"
    return None


def missing_names() -> list[str]:
    """Returns the private names that this torch lacks."""
    return [name for name in _NEEDED if not _has(name)]


def _has(dotted: str) -> bool:
    target: Any = torch
    for part in dotted.split(".")[1:]:
        target = getattr(target, part, None)
    return target is not None


# the device type -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """The questions that C++ asks a device guard."""

    device_count: int
    current: Callable[[], int]
    set_current: Callable[[int], None]
    synchronize: Callable[[int], None]


def register_device(module: object, answers: Answers) -> None:
    """Makes torch know the device type, its module, how many devices there are and which one a thread is on."""
    from torch.utils import backend_registration

    class Hooks(_C._acc.PrivateUse1Hooks):  # type: ignore[misc]
        def is_available(self) -> bool:
            return True

        def has_primary_context(self, index: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    class Guard(_C._acc.DeviceGuard):  # type: ignore[misc]
        def type_(self) -> Any:
            return _C._autograd.DeviceType.PrivateUse1

    guard = Guard()
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=module, hook=Hooks(), device_guard=guard)
    _answer_for_guard(guard, answers)
    counted = torch.accelerator.device_count()
    assert counted == answers.device_count, f"torch's device guard counts {counted} devices, not {answers.device_count}"


def _guard_header() -> Path:
    return Path(torch.__file__).parent / "include" / "c10" / "core" / "impl" / "DeviceGuardImplInterface.h"


def _virtual_functions(header: str) -> list[str]:
    """Returns the guard's virtual functions in the order of its table: as declared, and the destructor takes two entries."""
    body = header.split("struct C10_API DeviceGuardImplInterface {", 1)[1].split("\n};", 1)[0]
    body = re.sub(r"//[^\n]*|/\*.*?\*/", "", body, flags=re.DOTALL)
    names = re.findall(r"\bvirtual\b[^(;{]*?(~?\w+)\s*\(", body)
    return [entry for name in names for entry in ((name, name) if name.startswith("~") else (name,))]


_kept: list[object] = []  # objects to which C++ holds bare pointers


def _answer_for_guard(guard: object, answers: Answers) -> None:
    # Python may override only the guard's type. Its other functions are fixed at one device, on which autograd would
    # refuse index 1 and `.to("sim")` would ignore the current device. So the object gets a table of its own.
    pointer, small, device = ctypes.c_void_p, ctypes.c_int8, ctypes.c_uint16
    kind = 20  # DeviceType::PrivateUse1; a c10::Device is two bytes, the type and the index, passed in one register

    def get(this: int) -> int:
        return kind | answers.current() << 8

    def put(this: int, wanted: int) -> None:
        if wanted >> 8 != 0xFF:  # index -1 stands for "as it is"
            answers.set_current(wanted >> 8)

    functions: dict[str, Any] = {
        "deviceCount": ctypes.CFUNCTYPE(small, pointer)(lambda this: answers.device_count),
        "getDevice": ctypes.CFUNCTYPE(device, pointer)(get),
        "setDevice": ctypes.CFUNCTYPE(None, pointer, device)(put),
        "synchronizeDevice": ctypes.CFUNCTYPE(None, pointer, small)(lambda this, index: answers.synchronize(index)),
    }
    names = _virtual_functions(_guard_header().read_text())
    # A pybind object holds the C++ pointer behind its two-word Python header; the object starts with the pointer to its table.
    address = pointer.from_address(id(guard) + 2 * ctypes.sizeof(pointer)).value
    assert address is not None
    table = pointer.from_address(address)
    assert table.value is not None
    head = 2  # the words before the functions: offset and type information
    entries = pointer * (head + len(names))
    copy = entries.from_buffer_copy(entries.from_address(table.value - head * ctypes.sizeof(pointer)))
    for name, function in functions.items():
        copy[head + names.index(name)] = ctypes.cast(function, pointer).value
    # [Note: errors in backward] What torch calls while it unwinds from a hook that raised must not enter Python: with the error
    # still set a call there fails, in a function that may not throw, and ends the process. Torch's own exchangeStream does
    # enter Python. An empty function takes its place: torch does not manage streams here, and its result is not read.
    # For the same reason exchangeDevice and uncheckedSetDevice stay as they are, which is without effect.
    copy[head + names.index("exchangeStream")] = copy[head + names.index("synchronizeStream")]
    _kept.extend((guard, copy, *functions.values()))
    table.value = ctypes.addressof(copy) + head * ctypes.sizeof(pointer)


# tensors and storages ------------------------------------------------------------------------------------------------


class _DLDevice(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DLType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("dim", ctypes.c_int32),
        ("type", _DLType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


def empty_byte_tensor(index: int) -> torch.Tensor:
    """Returns a tensor of no bytes on that device: what every other tensor on it is an alias of, with another storage."""
    shape = (ctypes.c_int64 * 1)(0)
    described = _DLTensor(
        None, _DLDevice(12, index), 1, _DLType(1, 8, 1), shape, None, 0, None, None
    )  # 12: kDLExtDev, a plug-in's
    _kept.extend((shape, described))
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    tensor: torch.Tensor = _C._from_dlpack(new_capsule(ctypes.addressof(described), b"dltensor", None))
    return tensor


def storage_at(address: int, device: torch.device, num_bytes: int) -> torch.UntypedStorage:
    """Makes a storage over memory that other code keeps alive."""
    storage: torch.UntypedStorage = _C._construct_storage_from_data_pointer(address, device, num_bytes)
    return storage


def start_in_block(storage: torch.UntypedStorage) -> int:
    """Returns the byte of its allocation that a storage begins at: not the first one if it is that of a stretch."""
    return getattr(storage, "_sim_start", 0)


def overwrite(address: int, num_bytes: int) -> None:
    """Fills memory with ones, which are NaN in every floating dtype."""
    ctypes.memset(address, 0xFF, num_bytes)


# autograd and dispatch -----------------------------------------------------------------------------------------------


def next_sequence_number() -> int:
    """Returns one more than the number of the backward node that torch made last in this thread."""
    number: int = _C._autograd._get_sequence_nr()
    return number


def graph_task() -> int:
    """Returns the number of the backward pass that this thread is in; -1 outside of one."""
    number: int = _C._current_graph_task_id()
    return number


def device_of_node(node: Any, default: int) -> int:
    """Returns the device of what a backward node is given; `default` where that is none of ours."""
    for described in node._input_metadata:
        if described.device.type == NAME:
            index: int = described.device.index
            return index
    return default


def at_end_of_backward(callback: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


_key_sets: dict[str, Any] = {}


def excluding(key: str) -> Any:
    """Returns a context in which this thread dispatches past `key`."""
    if key not in _key_sets:
        _key_sets[key] = _C.DispatchKeySet(_C._parse_dispatch_key(key))
    return _C._ExcludeDispatchKeyGuard(_key_sets[key])


def include_key(key: str, wanted: bool) -> None:
    """Makes every operator called in this thread, and in the autograd threads of backwards it starts, pass `key`."""
    _C._dispatch_tls_set_dispatch_key_included(key, wanted)


def has_process_groups() -> bool:
    return hasattr(_C, "_c10d_init")


def is_composite(operator_name: str) -> bool:
    """Returns True for an operator that is made of others, through which it is seen."""
    return bool(_C._dispatch_has_kernel_for_dispatch_key(operator_name, "CompositeImplicitAutograd"))


def operators(wanted: Callable[[str], bool]) -> Iterator[torch._ops.OpOverload]:
    """Returns the aten operators whose full name is wanted; making one in Python takes 50 us, so names come first."""
    for full_name in _C._dispatch_get_all_op_names():
        if full_name.startswith("aten::") and wanted(full_name):
            name, _, overload = full_name.removeprefix("aten::").partition(".")
            yield getattr(getattr(torch.ops.aten, name), overload or "default")


# An operator with a kernel for this key works out its shapes apart from its numbers.
_STRUCTURED = "CompositeExplicitAutogradNonFunctional"


def is_made_of_pieces(operator_name: str) -> bool:
    """Returns True for an operator that torch makes of others on a device without a kernel for it."""
    if operator_name.startswith("aten::_foreach_"):
        return not is_composite(operator_name)
    return bool(_C._dispatch_has_kernel_for_dispatch_key(operator_name, _STRUCTURED))


def has_shapes(operator_name: str) -> bool:
    """Returns True for an operator the shapes of whose results torch works out apart from its numbers."""
    return any(_C._dispatch_has_kernel_for_dispatch_key(operator_name, key) for key in (_STRUCTURED, "Meta"))


def takes_numbers(operator_name: str) -> bool:
    """Returns True for an operator that takes Python's numbers in the place of tensors."""
    return bool(_C._should_allow_numbers_as_tensors(operator_name.removeprefix("aten::").partition(".")[0]))


def registered_name(op: torch._ops.OpOverload) -> str:
    """Returns the name under which a kernel of an aten operator is registered."""
    name: str = cast(Any, op).name()
    return name.removeprefix("aten::")


def new_library(namespace: str) -> Any:
    """Makes a library to register kernels in; they go when it goes."""
    library: Any = torch.library.Library
    return library(namespace, "IMPL")
