"""`vitwire router` while the encoder accepts, hangs, fails, is stopped or killed: every request ends."""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

import faulty_server
from checkpoints import Checkpoints
from engine import WORDS
from entered import entered
from routers import EngineProcess, RouterProcess, client_of, leaving, picture, router, user
from servers import ServerProcess, serving
from vitwire import Client, Item
from waiting import until

FLAGS = ("--cache-bytes", "100000000", "--graphs", "off", "--canary-seconds", "0")
WAIT = ("--encoder-wait=3", "--encoder-retries=1")
Json = dict[str, Any]


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Checkpoints) -> Path:
    return checkpoints("qwen3_vl")


@contextmanager
def encoder(checkpoint: Path, fault: Path) -> Iterator[ServerProcess]:
    with serving(checkpoint, *FLAGS, program=(faulty_server.__file__, str(fault))) as process:
        try:
            yield process
        finally:
            fault.write_text("")
            if process.process.poll() is None:
                process.process.send_signal(signal.SIGCONT)


server = entered(encoder)


@pytest.fixture
def received(stand_in: EngineProcess, fault: Path) -> Iterator[EngineProcess]:
    """The engine, with nothing recorded, and an encoder without faults before and after."""
    stand_in.requests()
    yield stand_in
    fault.write_text("")


def parts_of(request: Json) -> list[Json]:
    """The images of a request that the engine received."""
    parts: list[Json] = request["body"]["messages"][0]["content"][1:]
    return parts


@contextmanager
def asking(proxy: RouterProcess, model: str, *urls: str) -> Iterator["Future[ChatCompletion]"]:
    """A request in a thread."""
    with client_of(proxy) as llm, ThreadPoolExecutor(1) as pool:
        yield pool.submit(lambda: llm.chat.completions.create(model=model, messages=user(*urls)))


def failures(proxy: RouterProcess) -> dict[str, float]:
    reasons = ("unavailable", "overloaded", "timeout", "failed")
    counts = {each: proxy.metric("vitwire_router_fallbacks_total", reason=each) for each in reasons}
    return {reason: count for reason, count in counts.items() if count}


def test_the_engine_has_the_request_while_the_encoder_is_at_work(
    server: ServerProcess, received: EngineProcess, fault: Path
) -> None:
    """Equal images are stored once, and no rows come back to the router."""
    url = picture(seed=1)
    before = server.metric("vitwire_delivered_bytes_total"), server.metric("vitwire_items_total")
    with router(server.target, received.url, "--mode=reference") as proxy:
        fault.write_text("hang")
        with asking(proxy, f"rows-from-{server.target}", url, url) as answer:
            requests: list[Json] = []
            until(lambda: bool(requests.extend(received.requests()) or requests))
            assert not answer.done()
            fault.write_text("")
            assert answer.result(60).choices[0].message.content == "".join(WORDS)
        (first, second) = parts_of(requests[0])
        assert first == second
        assert first["type"] == "image_embeds"
        grid = tuple(first["image_embeds"]["image_grid_thw"])
        with Client(server.target) as client:
            (found,) = client.encode([Item(None, grid, content_id=first["uuid"])])
        rows = found.numpy().size * 2
        delivered = server.metric("vitwire_delivered_bytes_total") - before[0]
        assert delivered == 3 * rows, "two fetches of the engine, and the one above"
        with client_of(proxy) as llm:
            assert llm.chat.completions.create(model="tiny", messages=user(url)).choices
        assert server.metric("vitwire_delivered_bytes_total") == before[0] + delivered, "what is cached is not fetched"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("policy", ["engine", "error"])
def test_an_encode_that_fails_after_it_was_accepted(
    server: ServerProcess, received: EngineProcess, fault: Path, policy: str, stream: bool
) -> None:
    url, model = picture(seed=2), f"rows-from-{server.target}"
    flags = ("--mode=reference", f"--on-encoder-failure={policy}")
    with router(server.target, received.url, *flags) as proxy, client_of(proxy) as llm:
        fault.write_text("fail")
        if policy == "error":
            with pytest.raises(openai.InternalServerError) as caught:
                llm.chat.completions.create(model=model, messages=user(url), stream=stream)
            assert (caught.value.status_code, caught.value.code) == (502, "encoder_failed")
            assert caught.value.param == "messages[0].content[1].image_url"
            assert failures(proxy) == {}
            return
        answer = llm.chat.completions.create(model=model, messages=user(url), stream=stream)
        assert words(answer) == "".join(WORDS)
        first, second = received.requests()
        assert parts_of(first)[0]["type"] == "image_embeds"
        assert parts_of(second) == parts_of({"body": {"messages": user(url)}})
        assert failures(proxy) == {"failed": 1}


@pytest.mark.parametrize("policy", ["engine", "error"])
def test_rows_that_are_lost_before_the_engine_fetches_them(
    checkpoint: Path, received: EngineProcess, policy: str
) -> None:
    """A cache of one embedding: the second image replaces the first."""
    flags = ("--mode=reference", f"--on-encoder-failure={policy}", "--max-encoding=1")
    messages = user(picture(seed=5), picture(seed=6))
    with (
        serving(checkpoint, "--cache-bytes", "9000", "--graphs", "off") as server,
        router(server.target, received.url, *flags) as proxy,
        client_of(proxy) as llm,
    ):
        model = f"late-rows-from-{server.target}"
        if policy == "error":
            with pytest.raises(openai.InternalServerError, match="is cached") as caught:
                llm.chat.completions.create(model=model, messages=messages)
            assert caught.value.code == "encoder_failed"
        else:
            assert llm.chat.completions.create(model=model, messages=messages).choices
            assert failures(proxy) == {"failed": 1}
    assert parts_of(received.requests()[0])[0]["type"] == "image_embeds"


def words(answer: Any) -> str:
    if isinstance(answer, ChatCompletion):
        return answer.choices[0].message.content or ""
    return "".join(chunk.choices[0].delta.content for chunk in answer)


def test_errors_of_the_engine_and_of_the_caller_stay(server: ServerProcess, received: EngineProcess) -> None:
    flags = ("--mode=reference", "--on-encoder-failure=engine")
    with router(server.target, received.url, *flags) as proxy, client_of(proxy) as llm:
        with pytest.raises(openai.InternalServerError, match="the engine says 500"):
            llm.chat.completions.create(model="status-500", messages=user(picture(seed=3)))
        assert len(received.requests()) == 1, "the encoder did not fail, so nothing is sent again"
        with pytest.raises(openai.BadRequestError) as caught:
            llm.chat.completions.create(model="tiny", messages=user("data:image/png;base64,QUJD"))
        assert caught.value.code == "invalid_image"
        assert received.requests() == []
        assert failures(proxy) == {}


def test_a_caller_that_leaves_ends_what_is_stored_for_it(
    server: ServerProcess, received: EngineProcess, fault: Path
) -> None:
    with router(server.target, received.url, "--mode=reference") as proxy:
        before = server.metric("vitwire_requests_total", code="CANCELLED")
        fault.write_text("hang")
        with leaving(proxy, {"model": "silent", "messages": user(picture(seed=4))}):
            until(lambda: bool(received.requests()))
        until(lambda: server.metric("vitwire_requests_total", code="CANCELLED") > before)
        until(lambda: proxy.metric("vitwire_router_inflight_requests") == 0)


@pytest.mark.parametrize(
    ("mode", "policy", "number"),
    [
        ("reference", "engine", signal.SIGSTOP),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in product(["inline", "reference"], ["engine", "error"], [signal.SIGKILL, signal.SIGSTOP])
            if each != ("reference", "engine", signal.SIGSTOP)
        ),
    ],
)
def test_every_request_ends_when_the_encoder_is_lost_under_load(
    checkpoint: Path, stand_in: EngineProcess, tmp_path: Path, mode: str, policy: str, number: signal.Signals
) -> None:
    flags = (f"--mode={mode}", f"--on-encoder-failure={policy}", *WAIT)
    fault = tmp_path / "fault"
    fault.write_text("slow 0.05")
    stand_in.requests()
    with encoder(checkpoint, fault) as server, router(server.target, stand_in.url, *flags) as proxy:
        model = f"rows-from-{server.target}" if mode == "reference" else "tiny"
        answered = threading.Semaphore(0)

        def ask(seed: int) -> str:
            with client_of(proxy) as llm:
                try:
                    return words(llm.chat.completions.create(model=model, messages=user(picture(seed=100 + seed))))
                except openai.APIStatusError as error:
                    return str(error.code)
                finally:
                    answered.release()

        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(ask, seed) for seed in range(12)]
            for _ in range(4):
                assert answered.acquire(timeout=60)
            server.process.send_signal(number)
            outcomes = [answer.result(300) for answer in answers]
        until(lambda: proxy.metric("vitwire_router_inflight_requests") == 0)
        until(lambda: '"SERVING"' not in proxy.page("/health")[1])
        assert proxy.page("/health")[0] == (200 if policy == "engine" else 503)
        served = outcomes.count("".join(WORDS))
        if policy == "engine":
            assert served == len(outcomes), outcomes
            assert sum(failures(proxy).values()) >= 1
            assert failures(proxy).keys() <= {"unavailable", "timeout", "failed"}
        else:
            assert served < len(outcomes)
            assert set(outcomes) - {"".join(WORDS)} <= {"encoder_unavailable", "encoder_timeout", "encoder_failed"}
            assert failures(proxy) == {}
    unchanged = [request for request in stand_in.requests() if parts_of(request)[0]["type"] == "image_url"]
    assert bool(unchanged) == (policy == "engine")
