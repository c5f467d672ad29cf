"""One-line faults of the kinds that sharded training is known for, put back by tests.mutants; and who survives for good.

A survivor is in HARMLESS with the reason why it changes nothing, or it shows a test that is missing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    path: str
    before: str
    after: str
    at: int | None = None  # where in the file, of those that are made mechanically

    def applied(self, source: str) -> str:
        if self.at is not None:
            return source[: self.at] + self.after + source[self.at + len(self.before) :]
        if source.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.path} has {source.count(self.before)} places with {self.before!r}, not one.")
        return source.replace(self.before, self.after)


R, M, C, P = "zero/runtime/", "zero/memory/", "zero/comm/", "zero/plan/"

NAMED = [
    Mutant(
        "what was assigned to .data is not brought back",
        "zero/travel.py",
        "self._params.tensors[param].data = brought.get(param, place)",
        "self._params.tensors[param].data = place",
    ),
    Mutant(
        "what was assigned to .data meanwhile is written over",
        "zero/travel.py",
        "if not self._params.tensors[param].numel():",
        "if True:",
    ),
    Mutant(
        "what comes after the first backward waits for the settling",
        R + "reducer.py",
        "        while self.order:\n",
        "        while self.sent < len(self.order):\n",
    ),
    Mutant(
        "drop what is late",
        R + "agreement.py",
        "rest = wide | _union([counts.later | _left_open(counts, rounds, order) for counts in everyone])",
        "rest = wide | _union([counts.later for counts in everyone])",
    ),
    Mutant(
        "send late what only rank 0 has",
        R + "agreement.py",
        "rest = wide | _union([counts.later | _left_open(counts, rounds, order) for counts in everyone])",
        "rest = wide | counts_of_0.later | _left_open(counts_of_0, rounds, order) if (counts_of_0 := everyone[0]) else 0",
    ),
    Mutant(
        "divide twice",
        R + "window.py",
        "if not self.since.settled or agreement.discard:\n"
        "                self.shares.shard.multiply(self.scaling.at_settling(agreement.weight))",
        "if True:\n"
        "                self.shares.shard.multiply(self.scaling.at_settling(agreement.weight) * self.scaling.reduce)",
    ),
    Mutant(
        "divide never",
        P + "scaling.py",
        "return self.reduce / self.loss_scale",
        "return 1.0 / self.loss_scale",
    ),
    Mutant(
        "factor applied at keeping and at settling",
        P + "scaling.py",
        "return self._whole if settled else self._exact",
        "return self._whole",
    ),
    Mutant(
        "factor of a settled window forgotten",
        P + "scaling.py",
        "return self._whole if settled else self._exact",
        "return self._exact",
    ),
    Mutant(
        "settled again, multiplied again",
        R + "window.py",
        "if not self.since.settled or agreement.discard:\n",
        "if True:\n",
    ),
    Mutant(
        "reduce at the first hook only",
        R + "window.py",
        "            self.reducer.advance()\n",
        "            if not self.reducer.sent:\n"
        "                self.reducer.advance()\n"
        "            else:\n"
        "                self.reducer._rounds.pop(next(iter(self.reducer._rounds), -1), None)\n",
    ),
    Mutant(
        "order by arrival",
        R + "reducer.py",
        "        index = self.order[self.sent % len(self.order)]\n        self.sent += 1\n",
        "        index = next(iter(self._rounds), self.order[self.sent % len(self.order)])\n        self.sent += 1\n",
    ),
    Mutant(
        "everybody follows his own order",
        R + "reducer.py",
        "first = [index for index in agreement.order if index in reached]",
        "first = [index for index in self._arrived if index in reached]",
    ),
    Mutant(
        "fill missing gradients with zeros",
        R + "window.py",
        "self.used = self.used & ~agreement.removed | agreement.used",
        "self.used = self.params.all",
    ),
    Mutant(
        "used is what this rank used",
        R + "window.py",
        "self.used = self.used & ~agreement.removed | agreement.used",
        "self.used = self.used & ~agreement.removed | used_here",
    ),
    Mutant(
        "what was used stays used",
        R + "window.py",
        "self.used = self.used & ~agreement.removed | agreement.used",
        "self.used = self.used | agreement.used",
    ),
    Mutant(
        "gaps of a bucket are sent as they are",
        R + "reducer.py",
        "            for gap in gaps:\n                buffer[gap.start : gap.stop].zero_()",
        "            pass",
    ),
    Mutant(
        "absent parameters are sent as they are",
        R + "reducer.py",
        "                        if at == index:\n                            round_.buffer",
        "                        if at == -1:\n                            round_.buffer",
    ),
    Mutant(
        "a round of nothing is sent as it is",
        R + "reducer.py",
        "return self.staging.borrow(bucket.span.numel, sum_dtype(dtype) if wide else dtype).zero_()",
        "return self.staging.borrow(bucket.span.numel, sum_dtype(dtype) if wide else dtype)",
    ),
    Mutant(
        "check only the first tensor for inf",
        R + "shares.py",
        "        return sum(squares[bucket] for bucket in sorted(squares))\n",
        "        return sum(squares[bucket] for bucket in sorted(squares)[:1])\n",
    ),
    Mutant(
        "the norm of one rank's share only",
        R + "shares.py",
        "square = sum(squares) if self._sharded else squares[0]",
        "square = squares[0]",
    ),
    Mutant(
        "rows that wait keep their factor when gradients are multiplied",
        M + "flat.py",
        "        for rows in self.waiting.values():\n            rows.factors += (factor,)\n",
        "",
    ),
    Mutant(
        "rows that wait are stepped on as they came",
        R + "updater.py",
        "(*factors, coefficient)",
        "(coefficient,)",
    ),
    Mutant(
        "all factors of a gradient are one",
        M + "rows.py",
        "        if math.frexp(found[-1])[0] == 0.5 or math.frexp(factor)[0] == 0.5:\n",
        "        if True:\n",
    ),
    Mutant(
        "a parameter that is stepped in parts is stepped at its beginning each time",
        R + "fused_adam.py",
        "Span(first, behind).shifted(-starts[at])",
        "Span(0, behind - first)",
    ),
    Mutant(
        "the fused step adopts no edit",
        R + "fused_adam.py",
        "if not same_bits(olds[number], rounds_to):",
        "if scratch is None:",
    ),
    Mutant(
        "a stretch of the fused step ends anywhere",
        R + "fused_adam.py",
        "            stop -= (stop - starts[last]) % _REGISTER\n",
        "            pass\n",
    ),
    Mutant(
        "moments that are loaded are there twice",
        "zero/state.py",
        "    parts.updater.forget_moments()\n",
        "",
    ),
    Mutant(
        "gradients wait in the first window",
        M + "flat.py",
        "self._wanted = [True, False]",
        "self._wanted = [False, False]",
    ),
    Mutant(
        "rows that wait are not added up before more comes",
        M + "flat.py",
        "        self._pay(bucket)\n        self.add_up(bucket)\n        fresh =",
        "        self._pay(bucket)\n        fresh =",
    ),
    Mutant(
        "rows that wait are let go at once",
        R + "flight.py",
        "        self.shard.hold(bucket, Rows(rows",
        "        let_go(), (let_go := lambda: None)\n        self.shard.hold(bucket, Rows(rows",
    ),
    Mutant(
        "the norm leaves out rows that wait",
        R + "shares.py",
        "        for bucket, rows in shard.waiting.items():\n            squares[bucket] = rows.square(",
        "        for bucket, rows in ():\n            squares[bucket] = rows.square(",
    ),
    Mutant(
        "each rank judges for itself",
        R + "shares.py",
        "square = sum(squares) if self._sharded else squares[0]",
        "square = squares[self._group.rank]",
    ),
    Mutant(
        "norms are remembered over a change",
        R + "shares.py",
        "**{name: self._cut(value, piece) for name, value in keywords.items()})\n        self.forget_norms(param)",
        "**{name: self._cut(value, piece) for name, value in keywords.items()})",
    ),
    Mutant(
        "norms are remembered over a settling",
        R + "window.py",
        "        self.shares.forget_norms()\n        self.used",
        "        self.used",
    ),
    Mutant(
        "keep a stale master",
        R + "updater.py",
        "            self._masters.adopt(block)\n",
        "            pass\n",
    ),
    Mutant(
        "adopt every weight, edited or not",
        M + "masters.py",
        "        if master.is_cpu and same_bits(weight, master.to(weight.dtype, copy=True)):\n"
        "            continue  # as nearly always; a device is not asked, since its answer would have to be waited for\n",
        "        master.copy_(weight)\n",
    ),
    Mutant(
        "the host waits for each bucket that travels back",
        M + "masters.py",
        "            crossing.wait()\n            self._sent.append",
        "            crossing.finish()\n            self._sent.append",
    ),
    Mutant(
        "no version bump",
        R + "gatherer.py",
        "            torch.autograd.graph.increment_version(self._params.tensors[param])",
        "            pass",
    ),
    Mutant(
        "stand-ins only where used",
        R + "window.py",
        "            if param.dtype == self._stand_ins[index].own_dtype:",
        "            if False:",
    ),
    Mutant(
        "stand-ins stay where nobody used",
        R + "window.py",
        "self.params.set_grad(index, self._stand_ins[index] if index in used else None)",
        "self.params.set_grad(index, self._stand_ins[index])",
    ),
    Mutant(
        "later overwrites instead of adding",
        M + "flat.py",
        "        fresh = bucket not in self.shares\n",
        "        fresh = True\n",
    ),
    Mutant(
        "the second use overwrites the first",
        R + "reducer.py",
        "            elif not fresh:\n                place.add_(values, alpha=factor)\n            else:",
        "            else:",
    ),
    Mutant(
        "no catch-up rounds",
        R + "reducer.py",
        "while self.sent < agreement.rounds:",
        "while False:",
    ),
    Mutant(
        "catch up one round too few",
        R + "reducer.py",
        "while self.sent < agreement.rounds:",
        "while self.sent < agreement.rounds - 1:",
    ),
    Mutant(
        "forget wide",
        R + "settler.py",
        "wide=reducer.wide_buckets | later & self._line.narrow_buckets,",
        "wide=0,",
    ),
    Mutant(
        "add the second use in the narrow dtype",
        R + "reducer.py",
        "if not (exact and is_first) and dtype",
        "if not exact and dtype",
    ),
    Mutant(
        "what is to be added up is sent at once",
        R + "reducer.py",
        "exact = multiplier is None and grad.dtype == self.line.dtype_of(index) and not apart",
        "exact = multiplier is None and grad.dtype == self.line.dtype_of(index)",
    ),
    Mutant(
        "in the dtype of sums what is absent is what was there before",
        R + "reducer.py",
        "        round_ = (self._wide if wide else self._rounds).pop(index, None)\n",
        "        round_ = (self._wide if wide else self._rounds).pop(index, None)\n"
        "        if wide and round_:\n            return round_.buffer\n",
    ),
    Mutant(
        "a gradient in the dtype of sums that the user took out stays",
        R + "reducer.py",
        "            for rounds in (self._rounds, self._wide):\n                if index in rounds:\n",
        "            for rounds in (self._rounds,):\n                if index in rounds:\n",
    ),
    Mutant(
        "wide rounds leave the ordinary one out",
        R + "reducer.py",
        "            wide.add_(ordinary)\n",
        "",
    ),
    Mutant(
        "expected ignored",
        R + "reducer.py",
        "            self._expected = used_here\n",
        "",
    ),
    Mutant(
        "wait for what other ranks use",
        R + "reducer.py",
        "            self._expected = used_here\n",
        "            self._expected = agreement.used\n",
    ),
    Mutant(
        "discarded rounds are kept",
        R + "reducer.py",
        "keep = not agreement.discard",
        "keep = True",
    ),
    Mutant(
        "clearing keeps the sums",
        R + "window.py",
        "        self.shares.clear()\n        self.used = self.put = 0\n",
        "        self.used = self.put = 0\n",
    ),
    Mutant(
        "the user's own gradient is added to ours",
        R + "window.py",
        "            for index in set_bits(agreement.removed | agreement.replaced):\n                self.shares.zero(index)\n",
        "",
    ),
    Mutant(
        "a gradient that the user replaced is sent twice",
        R + "window.py",
        "            since.aside.pop(index, None)\n            self.reducer.drop_param(index)\n",
        "",
    ),
    Mutant(
        "the user's clearing is not seen",
        R + "window.py",
        "        return all(param.grad is None for param in self.params.tensors)",
        "        return False",
    ),
    Mutant(
        "local gradients are forgotten",
        R + "window.py",
        "            for index in set_bits(found.local):\n                self._collect_local(index, agreement.weight)\n",
        "",
    ),
    Mutant(
        "what waits aside is forgotten",
        R + "window.py",
        "        if aside is not None:\n            self.reducer.collect(index, aside)\n",
        "",
    ),
    Mutant(
        "what waits aside is left out of what is sent with it",
        R + "window.py",
        "            grad, multiplier = waiting.add_(grad, alpha=1.0 if multiplier is None else multiplier), None\n",
        "            pass\n",
    ),
    Mutant(
        "the user's own gradient is divided like ours",
        P + "scaling.py",
        "return self.loss_scale * (1.0 if total_weight is None else total_weight * self.reduce)",
        "return 1.0",
    ),
    Mutant(
        "a stand-in lives on in the next window",
        R + "window.py",
        "> _HELD_BY_US:",
        "> 1000:",
    ),
    Mutant(
        "a stand-in is put where another thread is about to write",
        R + "window.py",
        "if self.put >> index & 1 or index in self.since.writing or not",
        "if self.put >> index & 1 or not",
    ),
    Mutant(
        "no stand-in outside a synchronising backward",
        R + "window.py",
        "        if not since.placed:\n            self.put_stand_ins()\n",
        "        if not since.placed and self.boundary.synchronises:\n            self.put_stand_ins()\n",
    ),
    Mutant(
        "what nobody used takes what is written to it",
        R + "shares.py",
        "            return  # it stood for a gradient that turned out to be none",
        "            pass",
    ),
    Mutant(
        "other learning rates on other ranks",
        R + "agreement.py",
        "        if counts.settings != first.settings:\n",
        "        if False:\n",
    ),
    Mutant(
        "staging is kept for ever",
        R + "reducer.py",
        "        self.staging.release(keep=_KEPT)",
        "        pass",
    ),
    Mutant(
        "no_sync synchronises",
        R + "boundary.py",
        "        if self._no_sync_depth:\n            return False\n",
        "",
    ),
    Mutant(
        "weights count in the sum and not in the mean",
        R + "agreement.py",
        "weight=sum(counts.weight for counts in everyone) if",
        "weight=1.0 if",
    ),
    Mutant(
        "what counts nothing brings its NaN",
        R + "window.py",
        "        if multiplier == 0.0:\n            grad = torch.zeros_like(grad)",
        "        if False:\n            grad = torch.zeros_like(grad)",
    ),
    Mutant(
        "masters from the rounded weights",
        M + "flatten.py",
        "numel, sum_dtype(dtype) if rounded else dtype",
        "numel, dtype",
    ),
    Mutant(
        "publish only what this rank owns",
        R + "gatherer.py",
        "            if self._line.layout.num_shares > 1:\n",
        "            if False:\n",
    ),
    Mutant(
        "publish before the step is cast",
        R + "updater.py",
        "            self._masters.publish(block)\n",
        "            pass\n",
    ),
    Mutant(
        "the step moves what nobody used",
        "zero/parts.py",
        "                self.updater.step(batch, used, coefficient)\n",
        "                self.updater.step(batch, self.params.all, coefficient)\n",
    ),
    Mutant(
        "the loss scale is not divided out",
        "zero/optimizer.py",
        "window.scaling.lacking = window.scaling.loss_scale = scale",
        "window.scaling.lacking = scale",
    ),
    Mutant(
        "a skipped step is applied",
        "zero/optimizer.py",
        "        if not verdict.apply:\n"
        "            self.skipped_steps += 1\n"
        "            self._check_progress(verdict.grad_norm)\n"
        "            return\n",
        "        if not verdict.apply:\n            self.skipped_steps += 1\n",
    ),
    Mutant(
        "a share too far",
        M + "weights.py",
        "        span = bucket.share(rank)\n",
        "        span = bucket.share(max(rank - 1, 0))\n",
    ),
    Mutant(
        "sums in the dtype of the wire",
        C + "group.py",
        "total = torch.empty(rows.shape[1], dtype=sum_dtype,",
        "total = torch.empty(rows.shape[1], dtype=pieces.dtype,",
    ),
    Mutant(
        "rank 0's values are not sent to the others",
        R + "intake.py",
        "                group.broadcast(source).wait()\n",
        "",
    ),
    Mutant(
        "what rank 0 shows is lent again although some still read it",
        C + "shared_memory.py",
        ".view(memory.shape)\n        try:",
        ".view(told.finish() or memory.shape)\n        try:",
    ),
    Mutant(
        "a call takes whatever message came first",
        C + "pipes.py",
        "inbox.messages.pop(number)",
        "inbox.messages.pop(min(inbox.messages))",
    ),
    Mutant(
        "a message that was sent before the connection was lost counts",
        C + "pipes.py",
        "            elif connection == self._connection:\n",
        "            else:\n",
    ),
    Mutant(
        "a message that a pipe has no room for is lost",
        C + "pipes.py",
        "                else:\n                    self._unsent.popleft()",
        "                finally:\n                    self._unsent.popleft()",
    ),
    Mutant(
        "nobody notices that a rank is gone before the time is over",
        C + "pipes.py",
        "if way.is_gone}",
        "if way.is_gone and never}",
    ),
    Mutant(
        "a call takes what somebody sent who gave up meanwhile",
        C + "pipes.py",
        "if number >= inbox.end:",
        "if number >= inbox.end and number not in inbox.messages:",
    ),
    Mutant(
        "who gives up after a call takes its messages back",
        C + "pipes.py",
        "            self.open.discard(number)\n",
        "            pass\n",
    ),
    Mutant(
        "nobody is told that a rank gave up",
        C + "messages.py",
        "                self._pipes.give_up()\n",
        "                pass\n",
    ),
    Mutant(
        "what is sent over a newer connection is lost",
        C + "pipes.py",
        "self._newer.append(content[begin:end])",
        "pass",
    ),
    Mutant(
        "weights stay in memory that rank 0 lent",
        R + "intake.py",
        "may_keep = self._sharing is None",
        "may_keep = True",
    ),
    Mutant(
        "clipping by the norm of one parameter",
        R + "shares.py",
        "            local[param].append(amount)",
        "            local[param] = [amount]",
    ),
    Mutant(
        "watch: who ends by an error raises no alarm",
        C + "watch.py",
        '        _tried(lambda: self._store.set("alarm", "1"))  # who waits for this rank looks for that\n',
        "",
    ),
    Mutant(
        "watch: who ends by an error leaves no word",
        C + "watch.py",
        '        _tried(lambda: self._store.set(f"end/{self._rank}", words))\n',
        "",
    ),
    Mutant(
        "watch: last words without the place",
        C + "watch.py",
        'doing = f"{self.doing or _NOWHERE}{\'\' if place is None else place()}"',
        'doing = f"{self.doing or _NOWHERE}"',
    ),
    Mutant(
        "watch: a place outlives what it was in",
        C + "watch.py",
        "self._place = None if place is None else weakref.WeakMethod(place)",
        "self._place = self._place if place is None else weakref.WeakMethod(place)",
    ),
    Mutant(
        "watch: each rank says what it found itself",
        C + "watch.py",
        "return found if agreed is None else agreed.decode()",
        "return found",
    ),
    Mutant(
        "watch: nobody answers an alarm",
        C + "watch.py",
        '        self._store.set(f"here/{self._rank}", "1")\n',
        "",
    ),
    Mutant(
        "watch: a rank is touched again and again",
        C + "watch.py",
        "gone |= {rank: is_gone(rank) for rank in absent if rank not in gone}",
        "gone |= {rank: is_gone(rank) for rank in absent}",
    ),
    Mutant(
        "watch: the meeting is waited for though all that lack are gone",
        C + "watch.py",
        "if all(gone[rank] for rank in absent):",
        "if False:",
    ),
    Mutant(
        "watch: a rank that is gone did not come",
        C + "watch.py",
        "ended = [rank for rank in absent if gone.get(rank)]",
        "ended: list[int] = []",
    ),
    Mutant(
        "watch: an expensive store gets every line",
        C + "watch.py",
        "if self._is_there and (self._is_cheap or is_first):",
        "if self._is_there:",
    ),
    Mutant(
        "watch: a store that does not answer is asked again",
        C + "watch.py",
        "            self._is_there = False\n            return None\n",
        "            return None\n",
    ),
    Mutant(
        "watch: a thread is left to itself",
        C + "watch.py",
        "        asking.join()  # nothing",
        "        pass  # nothing",
    ),
    Mutant(
        "watch: who ended before the meeting is waited for",
        C + "watch.py",
        "            if left or (late and time.monotonic() > deadline):",
        "            if late and time.monotonic() > deadline:",
    ),
    Mutant(
        "watch: a meeting has no end",
        C + "watch.py",
        "            if left or (late and time.monotonic() > deadline):",
        "            if left:",
    ),
    Mutant(
        "watch: only one group is told",
        C + "watch.py",
        "    for watch in watching:\n        watch.leave(error)",
        "    for watch in watching[1:]:\n        watch.leave(error)",
    ),
    Mutant(
        "apart: a settled window is cleared without the others",
        R + "window.py",
        "not (self.since.stepped or self.since.over)",
        "not (self.since.settled or self.since.over)",
    ),
    Mutant(
        "apart: a settled window that the model cleared is not compared",
        R + "agreement.py",
        "        or _different_windows(everyone)\n",
        "",
    ),
    Mutant(
        "apart: ranks may ask for different parameters",
        "zero/optimizer.py",
        '        self._about("whole_grad", index)\n',
        "",
    ),
    Mutant(
        "apart: a failure on all ranks begins no window",
        R + "agreement.py",
        "starts_over=error is not None or apart or any(counts.failed for counts in everyone),",
        "starts_over=error is not None or apart,",
    ),
    Mutant(
        "apart: a step that is refused ends no window",
        "zero/engine.py",
        "        finally:\n            self._accumulation.begin()",
        "        except ZeroDivisionError:\n            self._accumulation.begin()",
    ),
    Mutant(
        "apart: whoever handled an error is still where it was",
        R + "window.py",
        '        self.settler.note("before a backward")\n',
        "",
    ),
    Mutant(
        "apart: a late rank is taken for one that is gone",
        C + "torch_group.py",
        'for late in ("imed out", "timeout")',
        'for late in ("imed out",)',
    ),
]

# Survivors, by name, and why they change nothing.
HARMLESS: dict[str, str] = {
    "off by one in agreement: used: int = 0 # parameters: had a gradient here [0 -> 1]": (
        "A default that the library never uses: whoever makes Counts there says what was used."
    ),
}
