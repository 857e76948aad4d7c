"""Health follows the engine, and nothing that a client does."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from entered import entered
from faults import FAULTY
from servers import PIXELS_ONLY, ServerProcess, serving
from vitwire import Client, InvalidItem, Item
from waiting import until

SERVICE = "vitwire.v1.EncoderService"
SERVING, NOT_SERVING = (health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING)
COLUMNS = 3 * 2 * 14 * 14
BUDGETS = ("--graphs", "simulated", "--budgets", "16,64", *PIXELS_ONLY)
FLAGS = ("--canary-seconds", "0.2", "--wedge-seconds", "1", *BUDGETS)
Break = Callable[[str], None]
Watch = Iterator[health_pb2.HealthCheckResponse]

server = entered(lambda checkpoints, fault: serving(checkpoints("qwen2_vl"), *FLAGS, program=(FAULTY, str(fault))))


def item() -> Item:
    return Item(np.ones((16, COLUMNS), np.float32), (1, 8, 2))


def wait_for(watch: Watch, status: int) -> None:
    while next(watch).status != status:
        pass


@pytest.fixture
def watched(server: ServerProcess) -> Iterator[Callable[[str], Watch]]:
    with ExitStack() as stack, grpc.insecure_channel(server.target) as channel:

        def watch(service: str) -> Watch:
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service), timeout=60)
            stack.callback(call.cancel)
            watch: Watch = call
            return watch

        yield watch


def test_a_canary_sings_while_nobody_asks_and_is_nobody_s_item(server: ServerProcess) -> None:
    ran = server.metric("vitwire_canaries_total", result="ok")
    until(lambda: server.metric("vitwire_canaries_total", result="ok") >= ran + 2)
    assert server.metric("vitwire_items_total") == 0
    assert server.metric("vitwire_graph_replays_total") == 0


@pytest.mark.parametrize(("kind", "reason"), [("hang", "no progress for"), ("fail", "the canary failed")])
def test_a_wedged_engine_shows_to_all_watchers_and_its_recovery_too(
    server: ServerProcess, watched: Callable[[str], Watch], fault: Path, kind: str, reason: str
) -> None:
    watches = [watched(service) for service in ("", SERVICE, "liveness") for _ in range(20)]
    for watch in watches:
        assert next(watch).status == SERVING
    fault.write_text(kind)
    for watch in watches:
        wait_for(watch, NOT_SERVING)
    assert server.page("/healthz")[0] == 503
    with grpc.insecure_channel(server.target) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(f"/{SERVICE}/GetModel")(b"", timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reason in str(refused.value.details())
    fault.write_text("")
    for watch in watches:
        wait_for(watch, SERVING)
    assert server.page("/healthz")[0] == 200
    with Client(server.target) as client:
        assert client.encode([item()])[0].shape[0] == 4


def test_a_hang_under_load_is_told_and_what_waited_is_answered_after_it(
    server: ServerProcess, watched: Callable[[str], Watch], fault: Path
) -> None:
    with Client(server.target) as client, ThreadPoolExecutor(4) as pool:
        alive = watched("liveness")
        assert next(alive).status == SERVING
        fault.write_text("hang")
        calls = [pool.submit(client.encode, [item()] * 3) for _ in range(4)]
        wait_for(alive, NOT_SERVING)
        fault.write_text("")
        assert [len(call.result(60)) for call in calls] == [3] * 4
        wait_for(alive, SERVING)


def test_no_mistake_of_a_client_turns_health(server: ServerProcess, watched: Callable[[str], Watch]) -> None:
    with Client(server.target) as client:
        for _ in range(20):
            with pytest.raises(InvalidItem):
                client.encode([Item(np.ones((16, COLUMNS), np.float32), (1, 4, 2))])
            with pytest.raises(InvalidItem):
                client.encode([Item(np.full((16, COLUMNS), np.nan, np.float32), (1, 8, 2))])
        for service in ("", SERVICE, "liveness"):
            assert next(watched(service)).status == SERVING
            assert client.health(service) == "SERVING"
