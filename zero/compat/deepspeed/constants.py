"""`deepspeed.constants`: where ranks meet, and how long they wait for each other."""

from __future__ import annotations

from datetime import timedelta

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=30)
