"""`deepspeed.ops`: its Adams. There are no operators to build."""

from __future__ import annotations

from zero.compat.deepspeed.ops import adam as adam
