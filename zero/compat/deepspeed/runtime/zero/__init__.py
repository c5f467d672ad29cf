"""`deepspeed.runtime.zero`: the names that `offload_states` takes."""

from __future__ import annotations

from zero.compat.deepspeed.runtime.zero import offload_config as offload_config
