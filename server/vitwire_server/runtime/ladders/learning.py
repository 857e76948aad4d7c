"""`--budgets learn`: a ladder that follows the loads. Used on the engine thread, but for the fits."""

import logging
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType

from vitwire_server.core.budgets import Ladder
from vitwire_server.core.grids import Footprint
from vitwire_server.core.reports import LadderMonitor, Refit
from vitwire_server.fitting.ladders import Proposal, gain, interpolated, propose
from vitwire_server.fitting.learned import Demands, Learned, LoadHistogram
from vitwire_server.runtime.ladders.calibration import worthwhile
from vitwire_server.runtime.ladders.live_capture import CaptureFailed, LiveCapture
from vitwire_server.scheduling.planner import Planner

_log = logging.getLogger(__name__)
_FIT_EVERY = 256
"""Loads from one fit to the next, at least."""
_FIT_SECONDS = 60.0
"""Time from one fit to the next, at least: they hold the interpreter."""
_PATIENCE = 1.0
"""Seconds that a budget waits to be captured while batches are ready."""
_MOST_FAILURES = 3
"""Failed changes after which the ladder stays as it is: each may cost a memory pool, see CudaRecorder."""


@dataclass(slots=True)
class Change:
    """A change of the ladder that is under way."""

    proposal: Proposal
    began: float
    captured: int = 0
    spent: float = 0.0
    """Seconds of the engine thread."""
    longest: float = 0.0
    """Seconds of the longest step, for which batches waited."""
    gain: float = 0.0
    """Share of the predicted time that it saves, with the new budgets' measured times."""


class LadderLearner:
    """A `scheduling.scheduler.Learner`. Fits in a thread; captures one budget after another, between batches."""

    def __init__(
        self,
        capture: LiveCapture,
        planner: Planner,
        demands: Demands,
        default: Ladder,
        monitor: LadderMonitor,
        *,
        keep: Callable[[Learned], None] | None = None,
        learned: Learned | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`planner` is in use with the ladder that was captured; `learned` is what was kept before.

        `keep` is called in the thread of the fits.
        """
        self._capture = capture
        self._planner = planner
        self._demands = demands
        self._default = [budget.tokens for budget in default]
        self._monitor = monitor
        self._keep = keep
        self._clock = clock
        self._histogram = LoadHistogram(learned.loads if learned else None)
        self._served = 0
        """Loads since the last change."""
        self._fitted_at = 0
        self._failures = 0
        self._waits_since = 0.0
        """When the next step began to wait."""
        self._fit: Future[Proposal | None] | None = None
        self._fit_after = 0.0
        self._change: Change | None = None
        self._steps: Generator[None, None, Planner] | None = None
        """What is left of the change that is under way."""
        self._judged: Future[float] | None = None
        """The gain by the new budgets' measured times, while it is computed."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="fitting")
        self.on_change: Callable[[Ladder], None] | None = None
        """Called with each new ladder, on the engine thread."""

    def planned(self, window: Sequence[Footprint], taken: int) -> None:
        if self._failures >= _MOST_FAILURES:
            return
        if (tokens := self._demands.of(window, taken)) is None:
            return
        self._histogram.add(tokens, taken / len(window))
        self._served += 1
        if self._histogram.added - self._fitted_at >= _FIT_EVERY and self._clock() >= self._fit_after:
            self._start_fit()

    def seconds_until_due(self, *, idle: bool) -> float:
        if under_way := self._fit or self._judged:
            return 0.0 if under_way.done() else inf
        if self._steps is None:
            return inf
        return 0.0 if idle else max(0.0, self._waits_since + _PATIENCE - self._clock())

    def step(self) -> Planner | None:
        if self._fit:
            self._begin(self._fit)
            self._fit = None
            return None
        if self._steps is None:
            return None
        start, planner, failure = self._clock(), None, ""
        try:
            next(self._steps)
        except StopIteration as end:
            self._steps, planner = None, end.value
        except CaptureFailed as error:
            failure = str(error)
        if failure:  # outside of the block: the traceback keeps tensors alive
            self._give_up(failure)
        self._spent(start)
        return planner

    def replaced(self) -> None:
        change, ladder = self._change, self._planner.ladder
        assert change, "a change ends with a new planner"
        self._change = None
        self._capture.graphs.keep(ladder)
        self._served = 0
        if self._keep:  # also one that is slower now, as a restart captures each budget whole, and tunes it
            self._worker.submit(self._keep, Learned(change.proposal.sizes, self._histogram.loads))
        if change.gain <= 0:
            self._monitor.refitted(Refit.KEPT)
            _log.info("a ladder was captured and measured to be slower than the old one, which stays until a restart")
            return
        self._announce(change, ladder)
        if self.on_change:
            self.on_change(ladder)

    def stop(self) -> None:
        self._steps = self._change = None
        self._failures = _MOST_FAILURES

    def _start_fit(self) -> None:
        if self._fit or self._steps:
            return
        self._fitted_at, self._fit_after = self._histogram.added, self._clock() + _FIT_SECONDS
        costs, current = self._planner.costs, sorted({budget.tokens for budget in self._planner.ladder})
        self._fit = self._worker.submit(propose, self._histogram.loads, current, self._default, costs, self._served)

    def _begin(self, fit: "Future[Proposal | None]") -> None:
        if error := fit.exception():  # which must not end the engine
            self._failures = _MOST_FAILURES
            _log.error("no ladder is learned any more: the fit failed", exc_info=error)
            return
        if (proposal := fit.result()) is None:
            self._monitor.refitted(Refit.KEPT)
            return
        self._change = Change(proposal, self._clock())
        self._steps = self._changed(proposal, self._change)
        self._waits_since = self._clock()

    def _changed(self, proposal: Proposal, change: Change) -> Generator[None, None, Planner]:
        """Capture a budget in each step; returns the planner for the new ladder, or for the old one if it is faster."""
        planner = self._planner
        known = {budget.tokens for budget in planner.ladder}
        ladder = self._capture.completed(Ladder(tuple(sorted({self._demands.budget(size) for size in proposal.sizes}))))
        ladder = Ladder(tuple(each for each in ladder if each in planner.ladder or each.tokens not in known))
        all_segments = {budget.tokens: budget for budget in ladder}
        predicted = interpolated(planner.costs, all_segments)  # as what cannot be timed is assumed to take
        measured, saved = dict(predicted.measured), dict(planner.costs.saved)
        beside = self._beside(planner)
        for budget in sorted(set(ladder) - set(planner.ladder), reverse=True):
            self._capture.capture(budget)
            change.captured += 1
            replay = predicted.replay_work(budget.tokens).device
            longest = all_segments[budget.tokens]
            held = budget.within(longest)
            seconds = self._capture.timed(held, budget, replay)
            if seconds is not None and budget == longest:
                measured[budget.tokens] = seconds + beside
            elif seconds is not None:
                others = self._capture.timed(held, longest, replay)
                saved[budget] = max(0.0, (others or 0.0) - seconds)
            yield
        costs = replace(planner.costs, measured=MappingProxyType(measured), saved=MappingProxyType(saved))
        judged = self._judged = self._worker.submit(gain, self._histogram.loads, sorted(known), proposal.sizes, costs)
        yield
        self._judged = None
        if error := judged.exception():
            raise CaptureFailed(f"the new ladder could not be judged: {error!r}") from error
        change.gain = judged.result()
        self._planner = planner.changed(worthwhile(ladder, costs) if change.gain > 0 else planner.ladder, costs)
        return self._planner

    def _beside(self, planner: Planner) -> float:
        """Seconds of the device that costs count beside a replay, which is all that can be timed between batches.

        They are the same for all budgets; the smallest is measured again.
        """
        costs, tokens = planner.costs, planner.ladder.budgets[0].tokens
        if tokens not in costs.measured:
            return 0.0
        smallest = max(budget for budget in planner.ladder if budget.tokens == tokens)
        seconds = self._capture.timed(smallest, smallest, costs.replay_work(tokens).device)
        return costs.measured[tokens] - seconds if seconds else 0.0

    def _give_up(self, error: str) -> None:
        self._steps = self._change = None
        self._failures += 1
        self._served = 0  # the next attempt has to be worth as much again
        self._capture.give_up(self._planner.ladder)
        self._monitor.refitted(Refit.FAILED)
        more = "no other is tried" if self._failures >= _MOST_FAILURES else "another is tried later"
        _log.warning("a learned ladder was not captured, and the old one stays in use; %s: %s", more, error)

    def _spent(self, start: float) -> None:
        """A step is done, and the next one waits."""
        self._waits_since = now = self._clock()
        if self._change:
            spent = now - start
            self._change.spent += spent
            self._change.longest = max(self._change.longest, spent)

    def _announce(self, change: Change, ladder: Ladder) -> None:
        proposal = change.proposal
        self._monitor.refitted(Refit.SWAPPED)
        self._monitor.changed(ladder, change.longest)
        _log.info(
            "%s ladder of %d budgets in use, %d of them captured in %.2f s over %.1f s (longest pause %.0f ms): "
            "predicted to save %.1f %% of the time, padding %.1f instead of %.1f %%",
            "default" if proposal.is_default else "learned",
            len(ladder),
            change.captured,
            change.spent,
            self._clock() - change.began,
            1e3 * change.longest,
            1e2 * change.gain,
            1e2 * proposal.padding,
            1e2 * proposal.padding_before,
        )
