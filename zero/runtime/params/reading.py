"""Reads parameters in stretches, with one of them gathered at a time."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zero.memory.values import Values
from zero.plan.layout import Span
from zero.runtime.params.absent import Absent
from zero.runtime.params.unread import Unread


class ParamReader:
    """Keeps the weights that were read last gathered for the next stretch, until it is closed or others are read."""

    def __init__(self) -> None:
        self._param: torch.Tensor | None = None
        self._held = contextlib.ExitStack()

    def values_of(self, param: torch.Tensor) -> Values:
        """Returns the values of a parameter or a buffer, which stays where it is."""
        return param.viewed() if isinstance(param, Unread) else _Param(param, self)

    def hold(self, param: torch.Tensor) -> None:
        if param is not self._param:
            self._held.close()
            self._param = param
            if isinstance(param, Absent):
                self._held.enter_context(param.in_chunk.cache.using([param.in_chunk]))

    def __enter__(self) -> ParamReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._param = None
        self._held.close()


class _Param:
    """The values of a parameter, read from where they are."""

    def __init__(self, param: torch.Tensor, reader: ParamReader) -> None:
        self.shape = tuple(param.shape)
        self.dtype = param.dtype
        self._param = param
        self._reader = reader

    @torch.no_grad()
    def read(self, span: Span) -> torch.Tensor:
        self._reader.hold(self._param)
        plain: Any = self._param.detach() if isinstance(self._param, nn.Parameter) else self._param
        line = plain.resolve_conj().resolve_neg().reshape(-1)[span.start : span.stop]
        return (line.clone() if isinstance(line, Absent) else line).cpu()
