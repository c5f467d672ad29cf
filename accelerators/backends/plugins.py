"""Devices that a plug-in adds to torch: a row for each, and one class for all of them.

That a plug-in can be imported does not say that there is a device: what counts is what torch has after the import.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module

from accelerators.interface import Accelerator
from accelerators.registry import Registration


@dataclass(frozen=True)
class KnownPlugin:
    """What torch cannot tell about a device of a plug-in."""

    name: str  # torch's name of the device type
    plugin: str  # the module that adds it to torch when it is imported
    communication_backend: str
    visible_devices_variable: str
    compile_backend: str = "inductor"
    priority: int = 250  # above mps and cpu, below what torch has built in

    def registration(self) -> Registration:
        needs = self.plugin.partition(".")[0]
        return Registration(self.name, partial(PluginAccelerator, self), self.priority, needs=needs)


KNOWN_PLUGINS = (
    KnownPlugin("npu", "torch_npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES"),
    KnownPlugin("hpu", "habana_frameworks.torch.core", "hccl", "HABANA_VISIBLE_MODULES", compile_backend="hpu_backend"),
    KnownPlugin("mlu", "torch_mlu", "cncl", "MLU_VISIBLE_DEVICES"),
    KnownPlugin("musa", "torch_musa", "mccl", "MUSA_VISIBLE_DEVICES"),
    KnownPlugin("gcu", "torch_gcu", "eccl", "TOPS_VISIBLE_DEVICES", compile_backend="topsgraph"),
    KnownPlugin("sdaa", "torch_sdaa", "tccl", "SDAA_VISIBLE_DEVICES"),
    # It answers as cuda too, and is itself the better answer, so it is asked first.
    KnownPlugin("supa", "torch_supa", "bccl", "SUPA_VISIBLE_DEVICES", priority=450),
)


class PluginAccelerator(Accelerator):
    """A device of the table; making one imports its plug-in."""

    def __init__(self, known: KnownPlugin) -> None:
        import_module(known.plugin)
        super().__init__(known.name)
        self.communication_backend = known.communication_backend
        self.visible_devices_variable = known.visible_devices_variable
        self.compile_backend = known.compile_backend
