"""How a rank's program goes wrong, in tests that let it."""

from __future__ import annotations

import atexit
import os
import sys
import traceback

import torch


class Failing:
    """Calls `at` in the middle of its step, before an optimizer's."""

    at = staticmethod(lambda: None)

    def step(self, closure=None):
        self.at()
        return super().step(closure)


class FailingSGD(Failing, torch.optim.SGD):
    pass


class FailingAdamW(Failing, torch.optim.AdamW):
    pass


def end_as_the_interpreter_does(error):
    """What happens to an error that nobody catches, in a process that runs somebody's program."""
    sys.last_value = error
    traceback.print_exception(error)
    atexit._run_exitfuncs()
    os._exit(1)
