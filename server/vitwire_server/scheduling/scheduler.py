"""The engine's loop: take a batch, launch it, deliver its results."""

import time
from collections import deque
from collections.abc import Callable
from math import inf

from vitwire_server.core.errors import DeadlineExceeded, EncodeFailed
from vitwire_server.core.reports import Monitor, Outcome
from vitwire_server.core.runner import Runner
from vitwire_server.scheduling.canary import Canary
from vitwire_server.scheduling.forecast import Forecast
from vitwire_server.scheduling.intake import Intake, Taken
from vitwire_server.scheduling.launched import Launched, log_failures
from vitwire_server.scheduling.learner import Learner
from vitwire_server.scheduling.planner import Planner, Prediction
from vitwire_server.scheduling.tickets import Entry
from vitwire_server.scheduling.watchdog import Watchdog

_HEARTBEAT_SECONDS = 0.5


class Scheduler:
    """Gives the engine a batch whenever it can take one; there is no timer while the device is idle.

    Each time it plans over the next items in turn and runs the first batch of the plan, so that items that
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
        """What the canary found to be wrong; empty if nothing."""
        return self._canary.fault if self._canary else ""

    def run(self) -> None:
        """Run batches until the intake is closed and empty.

        Whatever is raised, DeviceLost above all, ends the run: everything in flight is answered with
        EncodeFailed, then the error is raised to the caller.
        """
        try:
            while self._launched or not self.intake.is_finished:
                self._step()
        except BaseException:
            for entry in self.intake.abandon():
                self._deliver(entry, EncodeFailed("the engine stopped"))
            raise

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
        if learner is None or learner.seconds_until_due() > 0:
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
        due = self._learner.seconds_until_due() if self._learner else inf
        taken = self.intake.take(min(_HEARTBEAT_SECONDS, due) if wait else 0.0)
        for entry in taken.expired:
            self._monitor.item_dropped("queue", "deadline")
            self._deliver(entry, DeadlineExceeded("the deadline passed while the item was queued"))
        return self._execute(taken) if taken.batch else None

    def _execute(self, taken: Taken) -> Launched:
        assert taken.batch, "there is a batch to launch"
        self.last_launch = started = self._clock()
        for entry in taken.entries:
            self._monitor.item_waited(started - entry.arrived)
        if self._learner:
            self._learner.planned(taken.window, len(taken.entries))
        items = [entry.item for entry in taken.entries]
        predicted = self.intake.planner.predict(taken.batch.budget, [item.footprint for item in items])
        self._beat(predicted)
        self._forecast.launched(predicted.work, started)
        running = self._runner.launch(items, taken.batch.budget)
        return Launched(taken.entries, taken.batch, running, started, predicted)

    def _commit(self, done: Launched) -> None:
        """Bring a batch's rows to the host, count it and deliver the rows."""
        self._beat(done.predicted)
        collected = done.running.collect()
        now = self._clock()
        self._forecast.ran(done.predicted.work, done.started, now)
        outcomes = done.outcomes(collected, now)
        log_failures(done.entries, outcomes)
        self._monitor.batch_ran(done.report(collected, outcomes))
        for entry, outcome in zip(done.entries, outcomes, strict=True):
            self._deliver(entry, outcome)

    def _deliver(self, entry: Entry, outcome: Outcome) -> None:
        self.intake.answered(entry)
        if entry.ticket.cancelled:
            self._monitor.item_dropped("encoded", "cancelled")
        else:
            entry.ticket.deliver(entry.index, outcome)

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
        forward = sum(prediction.forward for prediction in under_way)
        attention = sum(prediction.attention for prediction in under_way)
        self.watchdog.beat(forward * max(1.0, self._forecast.pace), attention)
