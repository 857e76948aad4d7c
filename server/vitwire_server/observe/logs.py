"""Log lines on stderr, as text or JSON; repeated lines are limited."""

import json
import logging
import sys
import time
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock, Timer
from types import TracebackType

from vitwire_server.observe.tracing import REQUEST_ID, SPAN

_MOST = 10
_SECONDS = 10.0
_MOST_KINDS = 1000


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (RFC 3339, UTC), level, logger, message, request, trace and error."""

    def format(self, record: logging.LogRecord) -> str:
        line = _json_line(record.created, record.levelname.lower(), record.name, record.getMessage())
        if name := _request_id(record):
            line["request_id"] = name
        if span := SPAN.get():
            line["trace_id"] = span.trace_id
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """A text line that ends with the request's id."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        """Called by `format`, before it adds tracebacks."""
        name = _request_id(record)
        return super().formatMessage(record) + (f" [request {name}]" if name else "")


def _request_id(record: logging.LogRecord) -> str:
    """The record's request id, as set by the engine thread, else the current task's."""
    given: str = getattr(record, "request_id", "")
    return given or REQUEST_ID.get()


@dataclass(slots=True)
class _Window:
    """Counts of lines of one kind since `start`."""

    start: float
    shown: int = 0
    dropped: int = 0


class LimitedHandler(logging.StreamHandler):  # type: ignore[type-arg] # to stderr
    """Writes at most `most` lines of a kind in `seconds`, then a line with the number of dropped ones.

    A kind is a logger, a level, a message before its arguments are filled in, and the record's `kind`,
    if it has one. All of these are constants in the code, so the number of kinds is bounded.
    """

    def __init__(self, most: int = _MOST, seconds: float = _SECONDS) -> None:
        super().__init__()
        self._most = most
        self._seconds = seconds
        self._windows: dict[Hashable, _Window] = {}
        self._counting = Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging, under the handler's lock."""
        if self._shows(record):
            super().emit(record)

    def _shows(self, record: logging.LogRecord) -> bool:
        kind = (record.name, record.levelno, record.msg, getattr(record, "kind", None))
        with self._counting:
            now = time.monotonic()
            window = self._windows.get(kind)
            if len(self._windows) >= _MOST_KINDS:  # messages of another package may not be constants
                self._windows = {each: held for each, held in self._windows.items() if held.dropped}
            if window is None or (now - window.start >= self._seconds and not window.dropped):
                window = self._windows[kind] = _Window(now)
            if window.shown < self._most:
                window.shown += 1
                return True
            window.dropped += 1
            if window.dropped == 1:  # the timer reports the count and closes the window
                timer = Timer(max(0.0, window.start + self._seconds - now), self._report, [kind, record])
                timer.daemon = True
                timer.start()
            return False

    def _report(self, kind: Hashable, example: logging.LogRecord) -> None:
        with self._counting:
            count = self._windows.pop(kind).dropped
        text = "%d more lines like this were dropped in %g s, the first: %s"
        arguments = (count, self._seconds, example.getMessage())
        summary = logging.LogRecord(example.name, example.levelno, "", 0, text, arguments, None)
        with self.lock or Lock():
            super().emit(summary)


def configure_logs(log_format: str, level: str) -> None:
    """Log to stderr; other packages log warnings and errors only.

    In JSON, Python's warnings and tracebacks of uncaught exceptions become log lines too.
    """
    handler = LimitedHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("vitwire_server").setLevel(level.upper())
    if log_format == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught


def plain_line(text: str, log_format: str, level: str = "info") -> str:
    """A line such as "ready: …", plain in text format and a JSON object in JSON format."""
    if log_format != "json":
        return text
    return json.dumps(_json_line(time.time(), level, "vitwire_server", text), ensure_ascii=False)


def message_of(line: bytes) -> str:
    """The message of a server's line in either format."""
    text = line.decode(errors="replace")
    if text.startswith("{"):
        with suppress(ValueError):
            return str(json.loads(text).get("message", text))
    return text


def _json_line(created: float, level: str, logger: str, message: str) -> dict[str, str]:
    time_utc = datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds")
    return {"time": time_utc, "level": level, "logger": logger, "message": message}


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("vitwire_server").critical("uncaught exception", exc_info=(kind, error, trace))
