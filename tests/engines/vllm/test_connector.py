"""`VitwireECConnector`, loaded by vLLM's factory and driven by its scheduler, its front end and its worker code."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.vllm.conftest import SERVER_FLAGS, Cached, Engines, item
from tests.engines.vllm.engine import Engine

from servers import ServerProcess, serving
from vitwire import Client, Model
from vitwire.integrations.vllm import VitwireECConnector, image_part, reference_part

GRID = (1, 4, 4)
TEXT: list[dict[str, Any]] = []


def test_a_cached_image_reaches_the_language_model(engine: Engine, cached: Cached, model: Model) -> None:
    embedding = cached("hit")
    name = engine.add([reference_part(GRID, model, "hit")])
    engine.run(name)
    assert type(engine.connector) is VitwireECConnector
    assert not engine.errors
    assert len(engine.tokens[name]) == 2
    (rows,) = engine.gathered[name]
    assert rows.shape == (4, model.embedding_width)  # deepstack included
    assert torch.equal(rows, embedding.torch())
    assert engine.stats["fetched"] == 1
    assert engine.stats["streamed_bytes"] == rows.nbytes
    assert engine.stats["missing"] == engine.stats["failed"] == engine.stats["nixl_bytes"] == 0


def test_images_of_one_request_and_of_several(
    engine: Engine, cached: Cached, model: Model, server: ServerProcess
) -> None:
    first, second = cached("one"), cached("two", (1, 4, 8))
    hits = server.metric("vitwire_cache_hits_total")
    parts = [reference_part(GRID, model, "one"), reference_part((1, 4, 8), model, "two")]
    names = [engine.add(parts), engine.add(parts[::-1]), engine.add([parts[0], parts[0]])]
    engine.run(*names)
    assert not engine.errors
    one, two = first.torch(), second.torch()
    for name, rows in zip(names, ([one, two], [two, one], [one, one]), strict=True):
        assert all(map(torch.equal, engine.gathered[name], rows))
    assert engine.stats["fetched"] == 2
    assert server.metric("vitwire_cache_hits_total") == hits + 2  # once each, for all requests
    again = engine.add(parts)
    engine.run(again)
    assert engine.stats["fetched"] == 2  # they are in vLLM's encoder cache
    assert torch.equal(engine.gathered[again][0], one)


def test_a_miss_fails_its_request_alone_and_can_be_repeated(engine: Engine, cached: Cached, model: Model) -> None:
    cached("present")
    missed = engine.add([reference_part(GRID, model, "present"), reference_part(GRID, model, "absent")])
    present, text = engine.add([reference_part(GRID, model, "present")]), engine.add(TEXT)
    engine.run(missed, present, text)
    assert engine.errors == {missed}
    assert len(engine.tokens[present]) == len(engine.tokens[text]) == 2
    assert engine.stats["missing"] == 1
    cached("absent")
    again = engine.add([reference_part(GRID, model, "absent")])
    engine.run(again)
    assert engine.errors == {missed}
    assert engine.gathered[again]


def test_another_grid_is_a_miss(engine: Engine, cached: Cached, model: Model) -> None:
    cached("resized")
    name = engine.add([reference_part((1, 2, 8), model, "resized")])
    engine.run(name)
    assert engine.errors == {name}


def test_waits_for_content_that_is_not_cached_yet(engines: Engines, cached: Cached, model: Model) -> None:
    engine = engines(extra={"wait": 60.0})
    early, text = engine.add([reference_part(GRID, model, "late")]), engine.add(TEXT)
    engine.run(text)
    assert early in engine.scheduler.requests
    cached("late")
    engine.run(early)
    assert not engine.errors


def test_the_scheduler_never_waits(engines: Engines, cached: Cached, model: Model, server: ServerProcess) -> None:
    """With the server frozen, requests of text are answered, and the one with an image afterwards."""
    cached("frozen")
    engine = engines(extra={"timeout": 60.0})
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        pending = engine.add([reference_part(GRID, model, "frozen")])
        texts = [engine.add(TEXT) for _ in range(5)]
        start = time.monotonic()
        engine.run(*texts)
        engine.run_until(lambda: time.monotonic() > start + 1.0)
        assert pending in engine.scheduler.requests
        assert not engine.scheduler.running
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    engine.run(pending)
    assert not engine.errors
    assert engine.longest_schedule < 1.0


def test_server_down_and_restarted(engines: Engines, checkpoint: Path, model: Model) -> None:
    with serving(checkpoint, *SERVER_FLAGS) as server, Client(server.target) as client:
        client.encode([item("before"), item("resident")])
        target, port = server.target, server.port
        engine = engines(target, extra={"timeout": 30.0})
        first = engine.add([reference_part(GRID, model, "resident")])
        engine.run(first)
    down, kept = (engine.add([reference_part(GRID, model, each)]) for each in ("before", "resident"))
    engine.run(down, kept)
    assert engine.errors == {down}  # the other one is in vLLM's encoder cache
    assert engine.stats["failed"] == 1
    with serving(checkpoint, *SERVER_FLAGS, "--port", str(port)), Client(target, wait_for_ready=True) as client:
        lost = engine.add([reference_part(GRID, model, "before")])
        engine.run(lost)
        assert engine.errors == {down, lost}  # the new server's cache is empty
        (embedding,) = client.encode([item("before")])
        again = engine.add([reference_part(GRID, model, "before")])
        engine.run(again)
    assert engine.errors == {down, lost}
    assert torch.equal(engine.gathered[again][0], embedding.torch())


def test_another_model_fails_requests(
    engines: Engines, cached: Cached, model: Model, logged: pytest.LogCaptureFixture
) -> None:
    cached("wide")
    engine = engines()
    (fetcher,) = [engine.worker.ec_connector._fetcher]
    fetcher._expected = fetcher._expected.__class__(64, torch.bfloat16, torch.device("cpu"))
    name = engine.add([reference_part(GRID, model, "wide")])
    engine.run(name)
    assert engine.errors == {name}
    assert engine.stats["failed"] == 1
    assert "has shape (4, 192), vLLM's model takes (4, 64)" in logged.text
    assert name in logged.text


def test_rows_of_another_type_are_converted(engines: Engines, cached: Cached, model: Model) -> None:
    embedding = cached("converted")
    engine = engines(dtype="float32")
    name = engine.add([reference_part(GRID, model, "converted")])
    engine.run(name)
    assert torch.equal(engine.gathered[name][0], torch.from_numpy(embedding.numpy()))


def test_aborted_requests_leave_nothing(engines: Engines, cached: Cached, model: Model, server: ServerProcess) -> None:
    cached("aborted")
    engine = engines()
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        names = [engine.add([reference_part(GRID, model, "aborted")]) for _ in range(2)]
        queued = engine.add([reference_part(GRID, model, "never ordered")])
        engine.abort(queued)
        engine.step()
        engine.step()
        for name in names:
            engine.abort(name)
        engine.step()
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    assert not engine.connector._table._records
    assert not engine.worker.ec_connector._fetcher._held
    assert not engine.cache.encoder_outputs
    again = engine.add([reference_part(GRID, model, "aborted")])
    engine.run(again)  # late outcomes of the first fetch are not taken for those of the second
    assert engine.gathered[again]
    assert not engine.errors


def test_evicted_embeddings_are_fetched_again(engines: Engines, cached: Cached, model: Model) -> None:
    """An encoder cache of 64 rows, and 12 images of 16."""
    engine = engines(max_num_batched_tokens=64, max_model_len=64, enable_prefix_caching=False)
    config = engine.config.scheduler_config
    capacity = engine.scheduler.encoder_cache_manager.cache_size
    assert capacity >= config.encoder_cache_size
    count = 3 * capacity // 16
    embeddings = [cached(f"evicted {number}", (1, 8, 8)) for number in range(count)]
    for _ in range(2):
        names = [engine.add([reference_part((1, 8, 8), model, f"evicted {number}")]) for number in range(count)]
        engine.run(*names)
        for name, embedding in zip(names, embeddings, strict=True):
            assert torch.equal(torch.cat(engine.gathered[name]), embedding.torch())
    assert not engine.errors
    assert engine.stats["fetched"] > count
    assert sum(len(rows) for rows in engine.cache.encoder_outputs.values()) <= capacity
    assert not engine.worker.ec_connector._fetcher._held


def test_preempted_requests_finish(engines: Engines, cached: Cached, model: Model) -> None:
    """Twelve KV blocks for four requests of up to 5 blocks each."""
    engine = engines(blocks=12, enable_prefix_caching=False, max_model_len=160)
    names = []
    for number in range(4):
        cached(f"preempted {number}")
        names.append(engine.add([reference_part(GRID, model, f"preempted {number}")], tokens=60))
    engine.run(*names)
    assert not engine.errors
    assert all(len(engine.tokens[name]) == 60 for name in names)
    assert engine.preemptions


def test_reset_of_the_encoder_cache(engine: Engine, cached: Cached, model: Model) -> None:
    embedding = cached("reset")
    engine.run(engine.add([reference_part(GRID, model, "reset")]))
    engine.scheduler.reset_encoder_cache()
    engine.scheduler.reset_prefix_cache()
    engine.cache.reset_encoder_cache()
    again = engine.add([reference_part(GRID, model, "reset")])
    engine.run(again)
    assert torch.equal(engine.gathered[again][0], embedding.torch())


def test_other_images_are_left_to_the_engine(engine: Engine, cached: Cached, model: Model) -> None:
    name = engine.add([image_part(cached("inline"), model, uuid="inline")])
    request = engine.request(name)
    assert engine.connector.ensure_cache_available(request, 0)
    assert not engine.connector.has_cache_item("inline")
    engine.abort(name)


def test_asynchronous_scheduling(engines: Engines, cached: Cached, model: Model) -> None:
    """With a step in flight while the next is scheduled."""
    cached("async")
    engine = engines(async_scheduling=True)
    names = [engine.add([reference_part(GRID, model, each)], tokens=8) for each in ("async", "async", "not there")]
    engine.run(*names, in_flight=2)
    assert engine.errors == {names[2]}
    assert [len(engine.tokens[name]) for name in names[:2]] == [8, 8]


def test_the_step_after_a_fetch_uses_it(engines: Engines, cached: Cached, model: Model) -> None:
    """Though the output of the step before has not been used yet."""
    cached("soon")
    engine = engines(async_scheduling=True)
    name = engine.add([reference_part(GRID, model, "soon")])
    engine.step(in_flight=2)
    (fetch,) = engine.worker.ec_connector._fetcher._held.values()
    fetch.result(60)
    assert engine.step(in_flight=2)
    engine.run(name, in_flight=2)
    assert engine.gathered[name]
    assert engine.stats["fetched"] == 1


def test_long_prompts_are_computed_in_chunks(engines: Engines, cached: Cached, model: Model) -> None:
    engine = engines(max_num_batched_tokens=64, max_model_len=512, enable_prefix_caching=False)
    embeddings = [cached(f"chunk {number}", (1, 8, 8)) for number in range(8)]
    name = engine.add([reference_part((1, 8, 8), model, f"chunk {number}") for number in range(8)])
    engine.run(name)
    assert not engine.errors
    assert torch.equal(torch.cat(engine.gathered[name]), torch.cat([each.torch() for each in embeddings]))


def test_content_ids_beside_replaced_uuids(engine: Engine, cached: Cached, model: Model) -> None:
    """vLLM hashes uuids together with options of its processors."""
    cached("named")
    parts = [reference_part(GRID, model, "named")]
    options = {"media_io_kwargs": {"image": {"image_mode": "RGB"}}}
    hashed = engine.add(parts, chat=options)
    assert engine.request(hashed).mm_features[0].identifier != "named"
    engine.run(hashed)
    assert engine.errors == {hashed}
    named = engine.add(parts, chat=options, ec_transfer_params={"content_ids": ["named"]})
    engine.run(named)
    assert engine.errors == {hashed}
    assert engine.gathered[named]
