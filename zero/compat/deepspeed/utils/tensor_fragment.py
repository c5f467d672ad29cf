"""`deepspeed.utils.tensor_fragment`: values of one parameter, whole."""

from __future__ import annotations

from zero.compat.deepspeed.absent import rest_of
from zero.compat.deepspeed.utils import safe_get_full_fp32_param as safe_get_full_fp32_param
from zero.compat.deepspeed.utils import safe_get_full_grad as safe_get_full_grad
from zero.compat.deepspeed.utils import safe_get_full_optimizer_state as safe_get_full_optimizer_state
from zero.compat.deepspeed.utils import safe_set_full_fp32_param as safe_set_full_fp32_param
from zero.compat.deepspeed.utils import safe_set_full_grad as safe_set_full_grad
from zero.compat.deepspeed.utils import safe_set_full_optimizer_state as safe_set_full_optimizer_state
from zero.compat.deepspeed.utils import safe_update_full_grad_vectorized as safe_update_full_grad_vectorized

__getattr__ = rest_of(__name__)
