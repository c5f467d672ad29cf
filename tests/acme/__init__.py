"""The device "acme": a small C++ extension, built once a folder and loaded as a vendor's plug-in is when it is imported.

`bring_up()` makes torch know it, with the barest of device modules. Nothing here is written for accelerators or zero.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import types
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("acme.cpp")
NUM_DEVICES = 2
FOLDER = "TEST_ACME_FOLDER"  # where ranks find what the first process has built


def build() -> Path:
    """The library, built where it is not there yet; ranks inherit the folder."""
    from torch.utils import cpp_extension

    folder = Path(os.environ.setdefault(FOLDER, tempfile.mkdtemp(prefix="acme-")))
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = folder / f"libacme-{digest}.so"
    if not library.exists():
        compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")))
        includes = [f"-I{path}" for path in cpp_extension.include_paths()]
        paths = cpp_extension.library_paths()
        links = [*(f"-L{path}" for path in paths), *(f"-Wl,-rpath,{path}" for path in paths), "-ltorch", "-ltorch_cpu", "-lc10"]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = [
            compiler,
            "-shared",
            "-fPIC",
            "-O1",
            "-std=c++20",
            abi,
            *includes,
            str(SOURCE),
            "-o",
            str(unfinished),
            *links,
        ]
        subprocess.run(command, check=True, timeout=600)
        unfinished.rename(library)
    return library


def bring_up() -> None:
    if hasattr(torch, "acme"):
        return
    library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
    torch.utils.rename_privateuse1_backend("acme")
    module = types.ModuleType("torch.acme")
    module.is_available = lambda: True
    module.device_count = lambda: NUM_DEVICES
    module.current_device = library.acme_current_device
    module.set_device = library.acme_set_device
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    torch._register_device_module("acme", module)
