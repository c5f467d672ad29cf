"""Advice for the author of an accelerator, where a check of the contract fails."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

Check = TypeVar("Check", bound=Callable[..., Any])


def override(*members: str) -> Callable[[Check], Check]:
    """Marks a check with the members of the accelerator that decide it; a failure ends with their names."""

    def mark(check: Check) -> Check:
        @functools.wraps(check)
        def advised(*arguments: Any, **options: Any) -> Any:
            try:
                return check(*arguments, **options)
            except (Exception, pytest.fail.Exception) as error:
                advise(error, f"Override {' or '.join(members)} in your subclass of accelerators.Accelerator.")
                raise

        return advised  # type: ignore[return-value]

    return mark


def advise(error: BaseException, advice: str) -> None:
    """Adds a sentence to the text of an error."""
    said = str(error)
    if isinstance(error, pytest.fail.Exception):
        error.msg = f"{error.msg}\n{advice}"
    error.args = (f"{said}\n{advice}", *error.args[1:])
