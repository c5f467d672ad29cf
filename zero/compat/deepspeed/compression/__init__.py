"""`deepspeed.compression`: its helpers for modules by name; nothing is compressed here."""

from __future__ import annotations

from zero.compat.deepspeed.absent import rest_of
from zero.compat.deepspeed.compression import helper as helper

__getattr__ = rest_of(__name__, has_modules=True)
