"""Small trainings, each hard in its own way. `CASES` has them by name; tests.oracle says what each must give."""

from tests.zoo import (  # noqa: F401 - each import registers its cases
    accumulation,
    autograd,
    branches,
    clipping,
    edits,
    frozen,
    optimizers,
    shapes,
    sharing,
    whole_tensors,
)
from tests.zoo.case import CASES, Case

__all__ = ["CASES", "Case"]
