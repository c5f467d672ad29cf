"""`deepspeed.ops`: its Adams and Lions. There are no operators to build."""

from __future__ import annotations

from zero.compat.deepspeed.absent import rest_of
from zero.compat.deepspeed.ops import adam as adam
from zero.compat.deepspeed.ops import lion as lion

__getattr__ = rest_of(__name__, has_modules=True)
