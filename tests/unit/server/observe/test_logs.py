"""Log lines: what they carry, and how many of a kind are shown."""

import io
import json
import logging
import time
from collections.abc import Iterator
from itertools import count

import pytest

from vitwire_server.observe.logs import JsonFormatter, LimitedHandler, TextFormatter
from vitwire_server.observe.tracing import REQUEST_ID

SECONDS = 0.3
_names = count()


class Log:
    """A separate logger and its output."""

    def __init__(self) -> None:
        self.out = io.StringIO()
        self.handler = LimitedHandler(most=3, seconds=SECONDS)
        self.handler.setStream(self.out)
        self.logger = logging.getLogger(f"log{next(_names)}")
        self.logger.propagate = False
        self.logger.addHandler(self.handler)

    @property
    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()

    def wait_for(self, text: str) -> str:
        """The line that holds this text, once it is there."""
        deadline = time.monotonic() + 30
        while not (found := [line for line in self.lines if text in line]):
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.01)
        return found[0]


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.logger.removeHandler(made.handler)


def test_of_many_lines_of_a_kind_a_few_are_shown_and_the_rest_counted(log: Log) -> None:
    for number in range(100):
        log.logger.error("request %d is wrong", number)
    log.logger.error("something else")
    shown = ["request 0 is wrong", "request 1 is wrong", "request 2 is wrong", "something else"]
    assert log.lines == shown, "the count comes when the window closes"
    line = log.wait_for("more lines like this")
    assert line == f"97 more lines like this were dropped in {SECONDS:g} s, the first: request 3 is wrong"
    log.logger.error("request %d is wrong", 100)
    assert log.lines[-1] == "request 100 is wrong", "a new window has room again"


def test_kinds_are_told_apart(log: Log) -> None:
    for number in range(10):
        log.logger.warning("%s: %s", number, "a", extra={"kind": "a"})
        log.logger.warning("%s: %s", number, "b", extra={"kind": "b"})
    assert [line[-1] for line in log.lines].count("a") == 3
    assert [line[-1] for line in log.lines].count("b") == 3


def test_messages_that_are_no_constants_take_no_memory(log: Log) -> None:
    for number in range(5000):
        log.logger.warning(f"number {number}")  # noqa: G004 - as other packages do
    assert len(log.handler._windows) <= 1001


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_a_line_names_its_request(log: Log, formatter: logging.Formatter) -> None:
    log.handler.setFormatter(formatter)
    token = REQUEST_ID.set("order-66")
    log.logger.warning("inside")
    REQUEST_ID.reset(token)
    log.logger.warning("outside")
    inside, outside = log.lines
    assert "order-66" in inside
    assert "order-66" not in outside
    if isinstance(formatter, JsonFormatter):
        assert json.loads(inside).items() >= {"message": "inside", "level": "warning", "request_id": "order-66"}.items()
        assert "request_id" not in json.loads(outside)
