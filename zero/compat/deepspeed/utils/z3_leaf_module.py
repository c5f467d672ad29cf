"""`deepspeed.utils.z3_leaf_module`: modules of which nothing needs to be said here."""

from __future__ import annotations

from zero.compat.deepspeed.utils import get_z3_leaf_modules as get_z3_leaf_modules
from zero.compat.deepspeed.utils import set_z3_leaf_module as set_z3_leaf_module
from zero.compat.deepspeed.utils import set_z3_leaf_modules as set_z3_leaf_modules
from zero.compat.deepspeed.utils import unset_z3_leaf_modules as unset_z3_leaf_modules
from zero.compat.deepspeed.utils import z3_leaf_module as z3_leaf_module
