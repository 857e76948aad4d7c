"""The engine's loop: take a batch, launch it, deliver its results."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

from vitwire_server.core.errors import DeadlineExceeded, EncodeFailed
from vitwire_server.core.grids import Footprint
from vitwire_server.core.reports import Monitor, Outcome
from vitwire_server.core.runner import Runner
from vitwire_server.scheduling.canary import Canary
from vitwire_server.scheduling.forecast import Forecast
from vitwire_server.scheduling.intake import Intake, NextBatch
from vitwire_server.scheduling.launched import Launched, log_failures
from vitwire_server.scheduling.planner import Planner, Prediction
from vitwire_server.scheduling.tickets import Entry

_HEARTBEAT_SECONDS = 0.5
_LENIENCE = 10.0
"""Times its predicted time that a batch may take before the engine's thread counts as silent."""


class Learner(Protocol):
    """Changes the ladder while batches run. Called by the engine's thread only."""

    def planned(self, window: Sequence[Footprint], taken: int) -> None:
        """A batch takes `taken` of the items that waited."""
        ...

    def seconds_until_due(self, *, idle: bool) -> float:
        """When to call `step`, sooner if the engine is `idle`; infinite while there is nothing to do."""
        ...

    def step(self) -> Planner | None:
        """Do a part of the work, which takes up to a tenth of a second.

        Returns the planner to use from now on, if that changes. Raises DeviceLost.
        """
        ...

    def replaced(self) -> None:
        """The planner that `step` returned is in use, and nothing is in flight on budgets that it does not have."""
        ...

    def stop(self) -> None:
        """The engine stops: what is under way ends."""
        ...


class Watchdog:
    """Silence of the engine's thread beyond what its work explains. Fed by that thread, read by any."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._explained_until = clock()
        """One number, so that another thread never reads half of a beat."""

    def beat(self, predicted: float = 0.0, attention: float = 0.0) -> None:
        """The engine's thread is alive; the work under way explains these seconds of silence from now on.

        `attention` is an upper bound already, `predicted` is not.
        """
        self._explained_until = self._clock() + _LENIENCE * predicted + attention

    def silence(self) -> float:
        """Seconds without a beat that the work under way does not explain."""
        return max(0.0, self._clock() - self._explained_until)


class Scheduler:
    """Gives the engine a batch whenever it can take one; there is no timer while the device is idle.

    Each time it plans over the next items and runs the first batch of the plan, so that items that
    arrive in the meantime get their turn. `run` and all that it calls belong to the engine's thread; other
    threads use `intake`, and read `watchdog`, `last_launch` and `fault`.
    """

    def __init__(
        self,
        runner: Runner,
        planner: Planner,
        monitor: Monitor,
        *,
        canary: Canary | None = None,
        learner: Learner | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._canary = canary
        self._learner = learner
        self._forecast = Forecast()
        self._runner = runner
        self._monitor = monitor
        self._clock = clock
        self._launched: deque[Launched] = deque()
        self.intake = Intake(planner, self._forecast, monitor, clock)
        self.watchdog = Watchdog(clock)
        self.last_launch = clock()
        """When a batch was last started."""

    @property
    def fault(self) -> str:
        """The fault that the canary found; empty if there is none."""
        return self._canary.fault if self._canary else ""

    def run(self) -> None:
        """Run batches until the intake is closed and empty.

        Whatever is raised, DeviceLost above all, ends the run: everything in flight is answered with
        EncodeFailed, then the error is raised to the caller.
        """
        try:
            while self._launched or not self.intake.is_finished:
                self._step()
        finally:
            for entry in self.intake.abandon():  # none after an ordinary end
                self._deliver(entry, EncodeFailed("the engine stopped"))
            if self._learner:
                self._learner.stop()

    def _step(self) -> None:
        launched = self._launched
        while len(launched) < self._runner.depth and (work := self._take(wait=not launched)):
            launched.append(work)
        if launched:
            self._commit(launched.popleft())
        else:
            self._check_device()
        self._learn()

    def _learn(self) -> None:
        """Let the learner do a part of its work, if that is due."""
        learner = self._learner
        if learner is None or learner.seconds_until_due(idle=not self._launched and self.intake.is_empty) > 0:
            return
        self._beat()
        if planner := learner.step():
            while self._launched:
                self._commit(self._launched.popleft())
            self.intake.planner = planner
            if self._canary:
                self._canary.plan(planner)
            learner.replaced()
        self._forecast.interrupted(self._clock())
        self._beat()

    def _take(self, *, wait: bool) -> Launched | None:
        """The next batch, launched; None if nothing waits (and, with `wait`, after a heartbeat)."""
        self._beat()
        self._monitor.heartbeat()
        if wait:
            due = self._learner.seconds_until_due(idle=True) if self._learner else inf
            self.intake.wait(min(_HEARTBEAT_SECONDS, due))
        taken = self.intake.take()
        for entry in taken.expired:
            if entry.clip is None or not entry.clip.failed:
                self._monitor.item_dropped("queue", "deadline")
            self._deliver(entry, DeadlineExceeded("the deadline passed while the item was queued"))
        return self._execute(taken) if taken.batch else None

    def _execute(self, taken: NextBatch) -> Launched:
        assert taken.batch, "there is a batch to launch"
        self.last_launch = started = self._clock()
        if self._learner:
            self._learner.planned(taken.window, len(taken.entries))
        items = [entry.item for entry in taken.entries]
        predicted = self.intake.planner.predict(taken.batch.budget, [item.footprint for item in items])
        self._beat(predicted)
        self._forecast.launched(predicted.work, started)
        running = self._runner.launch(items, taken.batch.budget)
        for entry in taken.entries:
            self._monitor.item_waited(started - entry.arrived)
        return Launched(taken.entries, taken.batch, running, started, predicted)

    def _commit(self, done: Launched) -> None:
        """Bring a batch's rows to the host, count it and deliver the rows: metrics include what clients have."""
        self._beat(done.predicted)
        collected = done.running.collect()
        now = self._clock()
        self._forecast.ran(done.predicted.work, done.started, now)
        report = done.report(collected, now)
        log_failures(done.entries, report)
        self._monitor.batch_ran(report)
        for entry, (_, outcome) in zip(done.entries, report.items, strict=True):
            self._deliver(entry, outcome)

    def _deliver(self, entry: Entry, outcome: Outcome) -> None:
        self.intake.answered(entry)
        found = entry.clip.add(outcome) if entry.clip else outcome
        if entry.ticket.cancelled:
            self._monitor.item_dropped("encoded", "cancelled")
        elif found:
            entry.ticket.deliver(entry.index, found)

    def _check_device(self) -> None:
        """Run the canary if it is due and nothing waits."""
        canary, start = self._canary, self._clock()
        if canary is None or not canary.is_due(start, self.last_launch) or not self.intake.is_empty:
            return
        predicted = self.intake.planner.predict(canary.batch.budget, [canary.item.footprint])
        self._beat(predicted)
        passed = canary.run(self._runner, self._clock)
        self._forecast.ran(predicted.work, start, self._clock())
        self._monitor.canary_ran(passed=passed)

    def _beat(self, *work: Prediction) -> None:
        """Feed the watchdog: what is launched and `work` explain why the thread stays away."""
        under_way = [*work, *(batch.predicted for batch in self._launched)]
        forward = sum(prediction.work.alone for prediction in under_way)
        attention = sum(prediction.attention for prediction in under_way)
        self.watchdog.beat(forward * max(1.0, self._forecast.pace), attention)
