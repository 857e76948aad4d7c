"""Which tower encodes an image or clip: the encoder's, or the engine's if that is done earlier."""

import logging
import time
from math import inf

from vitwire.items import Modality

_log = logging.getLogger("vllm.vitwire")
_SHARE_OF_LAST = 0.3
"""Weight of the last value in a moving average."""
_MARGIN, _MARGIN_SECONDS, _BACK_SECONDS = 2.0, 0.1, 0.05
"""The encoder is left if its forecast is later than this many times the engine's, and by these seconds more.

It is chosen again as soon as it is not later by the last: without load the tower is often a little earlier.
"""
_LEAST_SECONDS = 1.0
"""Between two changes of the tower."""
_LEAST_TOKENS = 256
"""Smaller items count as this one: their time hardly depends on their size, and would make large ones seem slow."""
_HALF_LIFE = 10.0
"""Seconds in which half of what preparation took is forgotten: no item shows that it is faster by now."""
_PROBE_SECONDS, _PROBE_ITEMS = 0.5, 3
"""While the engine's tower is chosen, one item goes to the encoder after this time and this number of others.

This keeps its forecast current; the number keeps slow traffic from trying the encoder with each item.
"""


class Average:
    """Moving average; None before the first value. at: moment of the last one."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.at = 0.0

    def add(self, value: float) -> None:
        self.at = time.monotonic()
        self.value = value if self.value is None else self.value + _SHARE_OF_LAST * (value - self.value)


ENGINE_PACE = Average()
"""Seconds for each embedding in the tower of this process' engine, as the engine's workers report them."""


def ran(seconds: float, tokens: float) -> None:
    """The tower ran. A run that compiles counts as at most twice the average, or no item would be tried again."""
    ENGINE_PACE.add(min(seconds / max(tokens, _LEAST_TOKENS), 2 * (ENGINE_PACE.value or inf)))


class Choice:
    """Forecasts of both towers, from what this front end sees.

    The encoder's: what the server forecast for the item that it accepted last, less the time since, plus what upload
    and decoding took beside such forecasts. The engine's: the items that this front end gave its tower and that should
    not be done yet, at the pace of its workers, plus preparation in this process. No lock: each value is one
    assignment, and either of two is right.

    sharers: front ends for each engine; one counts on its share of the tower.
    """

    def __init__(self, sharers: float) -> None:
        self._sharers = sharers
        self._beside: dict[Modality, Average] = {"image": Average(), "video": Average()}
        self._preparing: dict[Modality, Average] = {"image": Average(), "video": Average()}
        self._encoder_idle = self._engine_idle = 0.0
        """Moments at which each should be done with what it has."""
        self._is_engine = False
        self._changed = self._probed = -inf
        self._unprobed = 0
        """Items that the engine's tower got since."""

    def accepted(self, forecast: float) -> None:
        """The server accepted an item that it will be done with in `forecast` seconds."""
        self._encoder_idle = time.monotonic() + forecast

    def stored(self, modality: Modality, seconds: float, forecast: float) -> None:
        """An item was stored `seconds` after its upload began."""
        self._beside[modality].add(seconds - forecast)

    def prepared(self, modality: Modality, seconds: float, tokens: int) -> None:
        """An item, or several of one request, was decoded and preprocessed for the engine's tower."""
        self._preparing[modality].add(seconds / max(tokens, _LEAST_TOKENS))

    def is_engine_earlier(self, modality: Modality, tokens: int) -> bool:
        """Whether the engine's tower encodes an item of `tokens` embeddings; it counts on that. False at first."""
        now, pace = time.monotonic(), ENGINE_PACE.value
        beside, preparing = self._beside[modality].value, self._preparing[modality]
        if pace is None or beside is None:
            return False
        work = tokens * pace * self._sharers
        encoder = max(0.0, max(0.0, self._encoder_idle - now) + beside)
        prepare = (preparing.value or 0.0) * 0.5 ** ((now - preparing.at) / _HALF_LIFE)
        engine = max(0.0, self._engine_idle - now) + max(work, tokens * pace) + tokens * prepare
        is_later = encoder > (engine + _BACK_SECONDS if self._is_engine else _MARGIN * engine + _MARGIN_SECONDS)
        if is_later != self._is_engine and now >= self._changed + _LEAST_SECONDS:
            self._is_engine, self._changed, self._probed = is_later, now, now
            text = "from now on %s encodes images and clips: forecast %.3f s for the encoder, %.3f s for the engine"
            _log.warning(text, "the engine's tower" if is_later else "the encoder", encoder, engine)
        if not (self._is_engine and is_later):
            return False
        if now >= self._probed + _PROBE_SECONDS and self._unprobed >= _PROBE_ITEMS:
            self._probed, self._unprobed = now, 0
            return False
        self._unprobed += 1
        self._engine_idle = max(now, self._engine_idle) + work
        return True
