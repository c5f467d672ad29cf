"""`deepspeed.runtime.zero.partition_parameters`: `Init`, `GatheredParameters`, and the states that a parameter has there."""

from __future__ import annotations

from enum import Enum

from zero.compat.deepspeed.absent import rest_of
from zero.compat.deepspeed.runtime.zero.utils import is_zero_param as is_zero_param
from zero.compat.deepspeed.zero import GatheredParameters as GatheredParameters
from zero.compat.deepspeed.zero import Init as Init
from zero.compat.deepspeed.zero import register_external_parameter as register_external_parameter
from zero.compat.deepspeed.zero import unregister_external_parameter as unregister_external_parameter


class ZeroParamStatus(Enum):
    """Which state `ds_status` names. No parameter has that attribute here: it is whole wherever it is used."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """Which kind `ds_param_type` names; no parameter has it here."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def shutdown_init_context() -> None:
    """Does nothing: `Init` changes nothing that a model would have to be built without."""


def restore_init_context() -> None:
    """Does nothing."""


__getattr__ = rest_of(__name__)
