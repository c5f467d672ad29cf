"""`deepspeed.compression`: its helpers for modules by name; nothing is compressed here."""

from __future__ import annotations

from zero.compat.deepspeed.compression import helper as helper
