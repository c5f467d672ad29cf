"""`deepspeed.ops`: its Adams and Lions. There are no operators to build."""

from __future__ import annotations

from zero.compat.deepspeed.ops import adam as adam
from zero.compat.deepspeed.ops import lion as lion
