"""The accelerators that this project knows, as records; each is imported when it is first tried."""

from accelerators.backends.plugins import KNOWN_PLUGINS
from accelerators.registry import Registration

BUILT_IN = (
    Registration("cuda", "accelerators.backends.cuda:CudaAccelerator", priority=400),
    Registration("xpu", "accelerators.backends.xpu:XpuAccelerator", priority=300),
    Registration("mps", "accelerators.backends.mps:MpsAccelerator", priority=200),
    Registration("cpu", "accelerators.backends.cpu:CpuAccelerator", priority=0),
    *(plugin.registration() for plugin in KNOWN_PLUGINS),
)
