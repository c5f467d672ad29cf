"""`deepspeed.runtime.zero`: the names that `offload_states` takes, and those of a parameter's state."""

from __future__ import annotations

from zero.compat.deepspeed.runtime.zero import offload_config as offload_config
from zero.compat.deepspeed.runtime.zero import partition_parameters as partition_parameters
