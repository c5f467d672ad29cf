"""The table `state` of the user's optimizer: it is by master, and does what programs of plain torch do with it by parameter."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from zero.memory.masters import Masters
    from zero.runtime.params.table import Params


class StateOfShares(defaultdict[Any, Any]):
    """The state of an optimizer, which has it by master: for a parameter in shares there is none beside that of its masters.

    To take the state of such a parameter away, or to set an empty one, resets that of its masters, as in plain torch.
    """

    # These are weak references: the user's optimizer may outlive the training.
    _params: Callable[[], Params | None] = staticmethod(lambda: None)
    _masters: Callable[[], Masters | None] = staticmethod(lambda: None)

    def begin(self, params: Params, masters: Masters) -> None:
        """Tells it of the masters of a training."""
        self._params, self._masters = weakref.ref(params), weakref.ref(masters)

    def end(self) -> None:
        """Ends the training: what is set by parameter from here on is a parameter's state."""
        vars(self).clear()

    def _in_shares(self, key: Any) -> tuple[str, list[Any]] | None:
        """Returns the name of a parameter in shares, and the masters that this rank has of it; None for anything else."""
        params, masters = self._params(), self._masters()
        index = None if params is None else params.index.get(id(key))
        if params is None or masters is None or index is None or masters.layout_ref.layout.slots[index] is None:
            return None
        return params.names[index], [master for _, master in masters.of(index)]

    def __missing__(self, key: Any) -> Any:
        param = self._in_shares(key)
        return super().__missing__(key) if param is None else _NoState(param[0])

    def __setitem__(self, key: Any, state: Any) -> None:
        param = self._in_shares(key)
        if param is None:
            super().__setitem__(key, state)
        elif state:
            raise _no_state(param[0])
        else:
            self.pop(key)

    def __delitem__(self, key: Any) -> None:
        if self._in_shares(key) is None:
            super().__delitem__(key)
        else:
            self.pop(key)

    def pop(self, key: Any, *default: Any) -> Any:
        param = self._in_shares(key)
        if param is None:
            return super().pop(key, *default)
        name, masters = param
        for each in (key, *masters):
            super().pop(each, None)
        return _NoState(name)


class _NoState(dict[str, Any]):
    """The state of a parameter in shares beside that of its masters: empty, and whatever is looked for or set is refused."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise _no_state(self._name)

    __contains__ = __missing__ = __setitem__ = get = pop = setdefault = update = _refuse


def _no_state(name: str) -> ValueError:
    return ValueError(
        f"Cannot use the state of {name} in optimizer.state: that has the shares of this rank, and not the parameters. Read it "
        "with optimizer.whole_state(parameter), load it by name with optimizer.load_state_dict, on all ranks, and step with "
        "the optimizer that zero.shard returned."
    )
