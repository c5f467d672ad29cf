"""`deepspeed.utils.z3_leaf_module`: modules of which nothing needs to be said here."""

from __future__ import annotations

from zero.compat.deepspeed.utils import set_z3_leaf_modules as set_z3_leaf_modules
from zero.compat.deepspeed.utils import unset_z3_leaf_modules as unset_z3_leaf_modules
