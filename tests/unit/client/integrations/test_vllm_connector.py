"""The parts of the EC connector that need no vLLM: its settings, and the scheduler's table of fetches."""

from math import inf
from pathlib import Path

import pytest

from vitwire.integrations.vllm.settings import Settings
from vitwire.integrations.vllm.table import Content, Outcome, Table

OK = Outcome(seconds=0.5, streamed_bytes=8)


def content(name: str, rows: int = 4) -> Content:
    return Content(name, name, "image", (1, 4, rows), rows)


class Rig:
    """A table, whose fetches `report` answers for all workers."""

    def __init__(self, held_tokens: int = 100, workers: int = 1) -> None:
        self.table = Table(held_tokens, workers, seconds=10.0)
        self.workers = workers

    def ensure(self, request: str, *names: str, now: float = 0.0, urgent: bool = False, rows: int = 4) -> bool:
        return self.table.ensure(request, [content(name, rows) for name in names], now, urgent=urgent)

    def fetches(self, *freed: str) -> dict[str, int]:
        return {order.content.identifier: order.number for order in self.table.take_step(freed).fetches}

    def report(self, outcome: Outcome = OK) -> None:
        for number in self.fetches().values():
            self.table.reported(number, [outcome] * self.workers)


def test_a_content_is_fetched_once_and_loaded_once() -> None:
    rig = Rig()
    assert not rig.ensure("a", "x", "y")
    assert not rig.ensure("b", "x")
    assert not rig.table.has("x")
    rig.report()
    assert rig.ensure("a", "x", "y")
    assert rig.ensure("b", "x")
    assert rig.table.has("x")
    rig.table.allocated("x")
    step = rig.table.take_step(())
    assert [order.content.identifier for order in step.loads] == ["x"]
    assert not step.fetches
    assert rig.table.take_counts()["fetched"] == 2


def test_all_workers_have_to_report() -> None:
    rig = Rig(workers=2)
    rig.ensure("a", "x")
    (number,) = rig.fetches().values()
    rig.table.reported(number, [OK])
    assert not rig.ensure("a", "x")
    rig.table.reported(number, [OK])
    assert rig.ensure("a", "x")


@pytest.mark.parametrize("missing", [True, False])
def test_a_failure_on_one_worker_fails_all_requests_of_the_content(missing: bool) -> None:
    rig = Rig(workers=2)
    for request in "ab":
        rig.ensure(request, "x")
    rig.ensure("c", "y")
    numbers = rig.fetches()
    rig.table.reported(numbers["x"], [Outcome("gone", missing)])
    assert not rig.ensure("a", "x")
    assert not rig.fetches()  # it is not fetched again for a request that is about to fail
    assert rig.table.take_failed() == {"a", "b"}
    counts = rig.table.take_counts()
    assert (counts["missing"], counts["failed"]) == (int(missing), int(not missing))
    rig.table.reported(numbers["x"], [OK])  # the other worker's, late
    for request in "ab":
        rig.table.finished(request, ["x"])
    assert not rig.ensure("again", "x")
    assert rig.fetches()["x"] > numbers["x"]


def test_no_step_waits_for_a_late_fetch() -> None:
    rig = Rig()
    rig.ensure("a", "x")
    rig.report(Outcome(seconds=1.0))  # usual are 0.2 s of it by now
    rig.ensure("b", "y", now=5.0)
    waits = [rig.table.remaining([content("y")], now) for now in (5.0, 5.3, 5.5)]
    assert waits == [pytest.approx(0.2), 0.0, inf]
    assert rig.table.remaining([content("x")], 5.5) is None


def test_an_unreported_fetch_fails_in_the_end() -> None:
    rig = Rig()
    assert not rig.ensure("a", "x", now=0.0)
    rig.fetches()
    assert not rig.ensure("a", "x", now=11.0)
    assert rig.table.take_failed() == {"a"}
    assert rig.table.take_step(()).drops


def test_finished_requests_drop_what_nobody_else_waits_for() -> None:
    rig = Rig()
    rig.ensure("a", "x", "y")
    rig.ensure("b", "y")
    rig.table.finished("a", ["x", "y"])
    step = rig.table.take_step(())
    assert [order.content.identifier for order in step.fetches] == ["y"]  # "x" was never ordered
    rig.table.finished("b", ["y"])
    assert rig.table.take_step(()).drops == [step.fetches[0].number]
    rig.table.reported(step.fetches[0].number, [OK])  # late
    assert not rig.table.has("y")


def test_freed_embeddings_are_fetched_again() -> None:
    rig = Rig()
    rig.ensure("a", "x")
    rig.report()
    rig.table.allocated("x")
    rig.table.take_step(())
    assert rig.table.has("x")
    rig.fetches("x")
    assert not rig.table.has("x")
    assert not rig.ensure("b", "x")
    assert rig.fetches()


def test_an_embedding_freed_in_the_step_of_its_load_is_not_loaded() -> None:
    rig = Rig()
    rig.ensure("a", "x")
    rig.report()
    rig.table.allocated("x")
    step = rig.table.take_step(["x"])
    assert not step.loads
    assert step.drops == [1]


def test_room_ahead_is_for_whole_requests() -> None:
    rig = Rig(held_tokens=10)
    assert not rig.ensure("large", "l", rows=50)  # alone, so admitted
    assert list(rig.fetches()) == ["l"]
    assert not rig.ensure("b", "x", "y")
    assert not rig.fetches()
    assert not rig.ensure("running", "z", urgent=True)
    assert list(rig.fetches()) == ["z"]
    rig.table.finished("large", ["l"])
    rig.table.finished("running", ["z"])
    assert not rig.ensure("b", "x", "y")
    assert list(rig.fetches()) == ["x", "y"]
    assert not rig.ensure("c", "w")
    assert not rig.fetches()
    assert not rig.ensure("d", "x")  # nothing more to fetch
    assert not rig.table.take_step(()).fetches


def test_settings() -> None:
    settings = Settings.of({"target": "localhost:1", "timeout": 5, "tls": True, "delivery": "stream"})
    assert (settings.timeout, settings.tls, settings.delivery) == (5, True, "stream")
    settings.client("cuda:0").close()  # a stream needs no device


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "target: set the address"),
        ({"target": "h:1", "timeout": 0}, "timeout: must be at least"),
        ({"target": "h:1", "timeout": True}, "timeout: expected int or float, got True"),
        ({"target": "h:1", "output_type": "int8"}, "output_type: expected one of float32"),
        ({"target": "h:1", "token": "t", "token_file": "f"}, "set token or token_file, not both"),
        ({"target": "h:1", "tls_cert": "c"}, "tls_cert and tls_key must be set together"),
        ({"target": "h:1", "token_file": "/nowhere"}, "token_file: '/nowhere' is not a file"),
        ({"target": "h:1", "threads": 0}, "threads: must be at least 1"),
    ],
)
def test_wrong_settings(extra: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.of(extra)


def test_the_token_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    settings = Settings.of({"target": "localhost:1", "token_file": str(file)})
    assert "secret" not in repr(settings)
    settings.client(None).close()
