"""Steps masters on the host while the backward goes on, with `Offload.step_in_backward`.

The path of a bucket, beside the stops of docs/internals.md:
    4 keep      its sum travels home. `Window` offers the bucket here if all of its parameters have their gradient, in the last
                backward of the window
    6 step      `StepsAhead.start`, once the sum is added at home: its weights begin to come, and the thread steps its masters
    5 settle    `StepsAhead.finish`: the thread is waited for. What it has not been given is stepped as without it
    7 publish   with all others: until then the backward reads the weights of before, and masters are ahead of them

[Note: no second copy] Weights are not rounded here: what is rounded would have to wait on the host for the publishing, 2 bytes
a parameter. So `publish` rounds these masters once more. Nor are the weights kept that masters were compared with: the
checksum of that copy is, and the step refuses if the weights have another one.

[Note: handed on] Only the thread of the backward uses the home: it lends memory, begins copies and takes memory back as buckets
are sent. The thread beside it waits for a copy and runs the kernel, which needs no lock. At most `_MOST` buckets are with it,
so that no more memory is lent than a step needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

import accelerators
from accelerators.streams import Event
from zero.comm.group import Group
from zero.config.schema import ZeroConfig
from zero.memory.addresses import address_of
from zero.memory.gradient_shard import GradientShard
from zero.memory.masters import Masters
from zero.optim.several import has_step_of_its_own
from zero.optim.traits import settings_of
from zero.plan.stages import stage_of
from zero.runtime.kernels.select import has_fused_step
from zero.runtime.unshard.edits import checksum
from zero.setup.prepare import device_of
from zero.setup.selection import ManagedParams
from zero.sharding.update import Updater

_MOST = 2  # buckets that the thread has: one that is stepped, and one whose weights come meanwhile


def check_ahead(config: ZeroConfig, optimizer: torch.optim.Optimizer, params: ManagedParams, group: Group) -> None:
    """Refuses `step_in_backward` if something that a step depends on is known only when the backward has ended."""
    if not steps_ahead(config):
        return
    device = accelerators.of(device_of(params))
    after = "is known only after the backward"
    rules = (
        (config.clip is not None, f"clip={config.clip} scales by the norm of all gradients, which {after}", "Leave clip out."),
        (config.loss_scale is not None, f"with a loss scale a step may be skipped, which {after}", "Use dtype='bfloat16'."),
        (config.on_nonfinite != "propagate", f"whether on_nonfinite={config.on_nonfinite!r} skips a step {after}",
         "Use on_nonfinite='propagate'."),
        (config.on_unused == "raise", f"whether on_unused='raise' refuses a step {after}", "Use on_unused='leave'."),
        (stage_of(config.stage).shards_weights, "weights are in shares, which stage 3 steps together", "Use stage=2."),
        (group.size > 1, f"whether all of the {group.size} ranks step {after}", "Leave it out."),
        (not has_fused_step(optimizer, config.kernels) or has_step_of_its_own(optimizer),
         f"{type(optimizer).__name__} with kernels={config.kernels!r} does not step one bucket after the other",
         "Use torch's AdamW, and kernels='fused' or 'compiled'."),
        (any(each.away for each in params.placements), "states are in other homes than where they are stepped",
         "Leave homes out."),
        (not (device.is_synchronous or device.has_streams), f"{device.name} has no streams, so weights come when it is done",
         "Leave it out."),
    )  # fmt: skip
    for is_broken, why, remedy in rules:
        if is_broken:
            raise ValueError(f"Cannot use offload.step_in_backward=True: {why}. {remedy}")


def steps_ahead(config: ZeroConfig) -> bool:
    return config.offload is not None and config.offload.step_in_backward


class _BeingStepped(NamedTuple):
    """A bucket that the thread has."""

    bucket: int
    done: Future[None]


class StepsAhead:
    """A bucket is stepped here at most once in a window, from the sum of all gradients that it gets, or the window is torn.

    Between the first `start` and the publishing the window refuses by its phase what would read, change or save masters. What
    breaks off in between tears them.
    """

    def __init__(self, masters: Masters, gradients: GradientShard, updater: Updater) -> None:
        self._masters = masters
        self._gradients = gradients
        self._updater = updater
        self._waiting: deque[int] = deque()  # buckets that were sent whole, in that order
        self._given: deque[_BeingStepped] = deque()
        self._threads: ThreadPoolExecutor | None = None  # one thread, begun when it is first needed
        self._error: BaseException | None = None  # the first one of the thread
        self._settings = ""  # those of the groups that masters were stepped with
        self._begun: Event | None = None  # the time at which the first bucket of a window was started
        self._compared: dict[int, torch.Tensor] = {}  # by bucket: the checksum of the copy that its masters were compared with

    def offer(self, buckets: Sequence[int]) -> None:
        """Takes note of buckets that were sent with the gradients of all their parameters. A step does those with states on the
        device, or on a disk as a group that was added may have them."""
        self._waiting.extend(filter(self._is_on_host, buckets))

    def _is_on_host(self, bucket: int) -> bool:
        shard, masters = self._masters.shard, self._masters
        return shard.home_of(bucket) is not shard.homes.device and not masters.layout_ref.layout.buckets[bucket].away

    def forget_offers(self) -> None:
        """Forgets what was offered and not started: a step does the rest."""
        self._waiting.clear()

    def next_ready(self, has_landed: Callable[[int], bool]) -> int | None:
        """Returns a bucket to start, if the sum of one is there and the thread has room for it. Waits for nothing."""
        self._take_back(only_done=True)
        if self._error is not None or len(self._given) >= _MOST or not self._updater.steps_fused:
            return None
        while self._waiting:
            if not has_landed(self._waiting[0]):
                return None
            bucket = self._waiting.popleft()
            if not self.has(bucket):
                return bucket
        return None

    @torch.no_grad()
    def start(self, bucket: int, factor: float) -> None:
        """Has the thread step the masters of a bucket from `factor` times its sum."""
        masters, updater = self._masters, self._updater
        if not masters.ahead:
            masters.take_back_sent()  # a step is planned to have as much memory lent as what comes here takes
            self._settings = settings_of(updater.inner)
            updater.keep_settings()
            # A backward writes to no weights. So their copies come after this, and not after what it has given the device when
            # each begins. What a hook writes to them later is found by checksums.
            device = masters.weights_there(bucket).device
            self._begun = accelerators.of(device).current_stream(device.index).record_event()
        stepped = updater.to_step_ahead(bucket)
        masters.fetch(bucket, self._begun)
        masters.ahead.add(bucket)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="zero.ahead")
        total = self._gradients.shares[bucket]
        is_in_words = _is_in_words(masters.weights_there(bucket))

        def step() -> None:
            # The checksum is that of the copy, and not of the weights at some time: a hook may write to them, and then write
            # what was there before.
            self._compared[bucket] = _sum_of(masters.fetched(bucket), is_in_words)
            updater.step_ahead(stepped, total, factor)

        self._given.append(_BeingStepped(bucket, self._threads.submit(step)))

    def _take_back(self, only_done: bool = False) -> None:
        """Takes the memory of weights back from the thread, and waits for it unless `only_done`. An error is kept."""
        while self._given and (self._given[0].done.done() or not only_done):
            bucket, done = self._given[0]
            self._error = self._error or done.exception()
            last = self._masters.layout_ref.layout.blocks(bucket)[-1]
            self._masters.weights_of(last)  # waits for the copy, of which the thread knows nothing if it failed before
            self._masters.compared(last)
            self._given.popleft()

    def hold_weights(self) -> None:
        """Makes what the current stream is given next come after the copies of weights that are on their way."""
        for bucket, _ in self._given:
            self._masters.hold_weights(bucket)

    def has(self, bucket: int) -> bool:
        """Returns whether the masters of a bucket are stepped in this window already, or are being stepped."""
        return bucket in self._masters.ahead

    def finish(self) -> None:
        """Waits for the thread, and raises what went wrong in it."""
        self._take_back()
        self._waiting.clear()
        if self._error is not None:
            raise RuntimeError(
                f"Cannot step: a step of masters in the backward failed: {self._error}. Load a checkpoint."
            ) from self._error

    def check_settings(self) -> None:
        """Raises if the settings of groups are not those that masters were stepped with. Nothing is lost by it."""
        if settings_of(self._updater.inner) != self._settings or self._updater.has_other_groups:
            raise ValueError(
                "Cannot step with these settings of the optimizer's groups: step_in_backward has stepped masters of this "
                "window with others. Set them again, call step(), and change them before a backward."
            )

    def check_weights(self) -> None:
        """Raises if weights were written after masters were compared with them. Waits for the device."""
        masters, present, compared = self._masters, list[torch.Tensor](), list[torch.Tensor]()
        for bucket, total in self._compared.items():
            weights = masters.weights_there(bucket)
            present.append(_sum_of(weights, _is_in_words(weights)))
            compared.append(total)
        if present and not torch.equal(torch.stack(present).cpu(), torch.stack(compared)):
            raise ValueError(
                "Cannot step: weights were changed after step_in_backward had stepped their masters, and the change would be "
                "lost. Load a checkpoint, and change weights before a backward or after step()."
            )

    def end(self) -> None:
        """Notes that the masters' rounded values are the weights again."""
        self._masters.ahead.clear()
        self._compared.clear()

    def tear(self) -> None:
        """Ends what was begun: masters are stepped in part, until a load."""
        self._forget()
        if self._masters.ahead:
            self._masters.ahead.clear()
            self._masters.wholeness.tear("a step in the backward")

    def close(self) -> None:
        """Ends the thread. The weights are those of before the step, and masters go with the training."""
        self._forget()
        self._masters.ahead.clear()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _forget(self) -> None:
        self._take_back()
        self._masters.abandon()
        self._waiting.clear()
        self._compared.clear()
        self._error = None


def _is_in_words(weights: torch.Tensor) -> bool:
    return weights.nbytes % 8 == 0 and address_of(weights) % 8 == 0


def _sum_of(weights: torch.Tensor, is_in_words: bool) -> torch.Tensor:
    """Returns a checksum of weights, where they are. In words of 8 bytes it takes the least memory."""
    return checksum(weights.view(torch.int64) if is_in_words else weights)
