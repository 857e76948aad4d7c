"""The status page without a browser: what it says, and what it must never hold."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from cards import CARD
from vitwire_server.core.budgets import budget
from vitwire_server.core.errors import EncodeFailed
from vitwire_server.core.health import Health, State
from vitwire_server.core.items import Modality
from vitwire_server.core.models import NotOnDevice, Place, Preparation
from vitwire_server.core.plans import Fallback
from vitwire_server.core.reports import BatchReport, Outcome, Waiting
from vitwire_server.core.runner import Timings
from vitwire_server.observe.metrics import Metrics
from vitwire_server.observe.page import page, policy
from vitwire_server.observe.readings import Readings

HOSTILE = "<script>alert('x')</script>&\"</title>"
VOID = {"meta", "input", "rect"}


class Document(HTMLParser):
    """Rows of the tables and lists as words, in a document whose elements are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag in ("tr", "dt"):
            self.rows.append([])
        if tag in ("th", "td", "dt", "dd"):
            self.rows[-1].append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"th", "td", "dt", "dd"} & set(self._open):
            self.rows[-1][-1] += data


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics()
    small, large = (budget(tokens, merge=2, max_items=8, max_frames=8) for tokens in (64, 1024))
    made.model.captured(1, 2.0, 1 << 20)
    short = replace(large, max_segment_patches=256)
    made.ladder.in_use((small, short, large))
    made.model.attends({small: "triton", short: "triton", large: "fa4"})
    ran: list[tuple[Modality, Outcome]] = [(Modality.IMAGE, EncodeFailed("x"))] * 3
    made.engine.batch_ran(BatchReport(ran, 1, small, None, 48, Timings(0.1, 0.2, 0.3)))
    made.engine.batch_ran(BatchReport(ran, 1, None, Fallback.OVERSIZE, 5000, Timings(0.1, 0.2, 0.3)))
    made.engine.watch_queue(lambda: Waiting(7, 3 << 20, 70, 0.5))
    made.admission.limits(4096, 4 << 30)
    made.admission.changed(9, 5 << 20)
    made.cache.changed(2 << 20, 3 << 30, 0)
    made.rpc.received(6 << 20)
    made.rpc.item_failed("NOT_FOUND")
    return made


def serving() -> Health:
    health = Health()
    health.change(State.WARMING)
    health.change(State.SERVING)
    return health


def render(metrics: Metrics, health: Health | None = None) -> str:
    return page(Readings(metrics.registry), health or serving())


def test_tables_hold_the_figures(metrics: Metrics) -> None:
    rows = Document(render(metrics)).rows
    assert ["64", "3", "1", "25.0%", "triton", ""] in rows
    assert ["1024", "0", "0", "\u2013", "triton up to 256 patches, fa4", ""] in rows
    assert ["oversize", "3"] in rows
    assert ["requests", "0"] in rows
    assert ["waiting", "7 items"] in rows
    assert ["waiting bytes", "3 MiB"] in rows
    assert ["admitted", "9 of 4,096 items"] in rows
    assert ["admitted bytes", "5 MiB of 4 GiB"] in rows
    assert ["received", "6 MiB"] in rows
    assert ["item: not found", "1"] in rows
    assert ["budgets captured", "3 of 4"] in rows
    assert ["hit rate", "\u2013"] in rows
    assert ["on the host", "2 MiB"] in rows
    assert ["on the device", "3 GiB"] in rows


def test_what_is_prepared_where(metrics: Metrics) -> None:
    assert "Prepared" not in render(metrics), "a server that prepares nothing"
    given = replace(CARD, preparation=Preparation(Place.DEVICE, None), decoding=Preparation())
    metrics.model.described(given)
    assert "Prepared" not in render(metrics)
    metrics.model.described(replace(given, prepared=(Modality.IMAGE,)))
    for reason in (None, None, NotOnDevice.TOO_LARGE):
        metrics.rpc.prepared(reason)
    metrics.rpc.decoders(3, 2)
    metrics.rpc.waiting(5)
    for seconds in (0.010, 0.015):
        metrics.rpc.prepare_took(Place.CPU, {"decode": seconds})
    rows = Document(render(metrics)).rows
    assert ["pictures are prepared", "on the device"] in rows
    assert ["JPEG files are decoded", "on the CPU (no device)"] in rows
    assert ["prepared on the device", "2"] in rows
    assert ["prepared on the CPU (too large)", "1"] in rows
    assert ["decoders", "2 of 3 busy"] in rows
    assert ["waiting for one", "5"] in rows
    assert ["decode on the CPU, mean", "12.5 ms"] in rows
    assert not [row for row in rows if row[0].startswith("batch")], "none ran"
    pictures = BatchReport(
        [(Modality.IMAGE, EncodeFailed("x"))], 1, None, Fallback.OVERSIZE, 8, Timings(0, 1, 0, 0.002)
    )
    metrics.engine.batch_ran(pictures)
    assert ["batch on the device, mean", "2 ms"] in Document(render(metrics)).rows


def test_names_are_escaped(metrics: Metrics) -> None:
    names = ("model", "model_type", "dtype", "device", "graphs", "attention", "pooling", "version")
    metrics.model.loaded("c0ffee", **dict.fromkeys(names, HOSTILE))
    health = serving()
    health.change(State.FAILED, HOSTILE)
    text = render(metrics, health)
    assert HOSTILE not in text
    assert "alert" in text
    assert ["weights", "c0ffee"] in Document(text).rows
    assert Document(text).tags.count("script") == 1, "the page's own"


def test_nothing_comes_from_elsewhere(metrics: Metrics) -> None:
    text = render(metrics)
    assert not re.search(r"""https?:|//|\bsrc=|\bhref=|@import|url\(|\bon\w+=|\bstyle=""", text)
    assert policy().startswith("default-src 'none'; ")
    assert "unsafe" not in policy()


@pytest.mark.parametrize("state", list(State))
def test_the_state_is_shown(metrics: Metrics, state: State) -> None:
    health = Health()
    path = {State.WARMING: [State.WARMING], State.SERVING: [State.WARMING, State.SERVING]}.get(state, [state])
    for step in path:
        health.change(step, "the device is gone" if step is State.FAILED else "")
    text = render(metrics, health)
    assert f'<div class="state {state.value}">{state.value}' in text
    assert ("the device is gone" in text) is (state is State.FAILED)


def test_before_there_is_a_model() -> None:
    text = render(Metrics(), Health())
    assert "no model yet" in text
    assert "No budget has a graph" in text


def test_a_bar_is_as_long_as_its_share(metrics: Metrics) -> None:
    bars = re.findall(r'<svg class="bar".*?</svg>', render(metrics))
    (ground, real, padding), (_, unused_real, unused_padding) = (
        [float(each) for each in re.findall(r' width="([\d.]+)"', bar)] for bar in bars
    )
    assert (real / ground, padding / ground) == (48 / 64, 16 / 64)
    assert (unused_real, unused_padding) == (0, 0)
