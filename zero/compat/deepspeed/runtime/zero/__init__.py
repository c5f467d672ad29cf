"""`deepspeed.runtime.zero`: what `deepspeed.zero` has, what `offload_states` takes, and names of a parameter's state."""

from __future__ import annotations

from zero.compat.deepspeed.absent import rest_of
from zero.compat.deepspeed.runtime.zero import offload_config as offload_config
from zero.compat.deepspeed.runtime.zero import partition_parameters as partition_parameters
from zero.compat.deepspeed.runtime.zero import utils as utils
from zero.compat.deepspeed.runtime.zero.partition_parameters import GatheredParameters as GatheredParameters
from zero.compat.deepspeed.runtime.zero.partition_parameters import Init as Init
from zero.compat.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus as ZeroParamStatus
from zero.compat.deepspeed.runtime.zero.partition_parameters import ZeroParamType as ZeroParamType
from zero.compat.deepspeed.zero import register_external_parameter as register_external_parameter
from zero.compat.deepspeed.zero import unregister_external_parameter as unregister_external_parameter

__getattr__ = rest_of(__name__, has_modules=True)
