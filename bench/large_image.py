"""One large image in flight, step by step: the part `inline` of `make wire-bench`."""

import time
from argparse import Namespace
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench.alternation import PathTimes, alternated
from bench.client_processes import ClientProcess, bare_servers, prepared

from servers import ServerProcess
from vitwire import Client, Embedding, Model, Report
from vitwire.integrations.vllm import image_embeds, image_part
from vitwire.integrations.vllm.parts import unencoded_image_part
from vitwire_gateway.requests.filling import filled

Row = dict[str, Any]
PATHS: Mapping[str, tuple[str, Row]] = {
    "client": ("client", {}),
    "async": ("async", {}),
    "client, untuned": ("client", {"tuned": False}),
    "async, untuned": ("async", {"tuned": False}),
    "client, Unix socket": ("client", {"is_local": True}),
    "async, Unix socket": ("async", {"is_local": True}),
}
"""Kind of the client, whether its process calls `allocator.tune`, and whether it connects to the Unix socket."""
_STAGES = ("queue", "stage_in", "execute", "stage_out", "send")


def streams(server: ServerProcess, socket: Path, side: int, options: Namespace) -> Iterator[Row]:
    """A call of each client with the steps that it takes itself, beside bare gRPC, in alternation.

    socket: on which the server listens as well.
    """
    with ExitStack() as stack:
        target, pids = stack.enter_context(bare_servers(1))
        raw = {
            "bare": stack.enter_context(ClientProcess("raw", target=target, model=server.target)),
            "service": stack.enter_context(ClientProcess("raw", target=server.target)),
        }
        timed = {
            name: stack.enter_context(
                ClientProcess(
                    kind,
                    target=f"unix:{socket}" if how.get("is_local") else server.target,
                    tuned=how.get("tuned", True),
                    steps=True,
                )
            )
            for name, (kind, how) in PATHS.items()
        }
        work = {"side": side, "pixels": "uint8"}
        size = prepared([raw["service"], *timed.values()], work)
        prepared([raw["bare"]], {**work, "answer": size["answer"]})
        for client in timed.values():
            client.ask(steps={})
        clients, own = raw | timed, [server.process.pid]
        before = _server_seconds(server)
        times = alternated(clients, {name: pids if name == "bare" else own for name in clients}, 1, options)
        after = _server_seconds(server)
        for name, each in times.items():
            yield {
                "down_mb": round(size["down"] / 1e6, 1),
                "path": name,
                **_compared(each, times["bare"]),
                **(timed[name].ask(steps={}) if name in timed else {}),
            }
    calls = after["calls"] - before["calls"]
    spent = {f"server_{name}_ms": round(1e3 * (after[name] - before[name]) / calls, 2) for name in _STAGES}
    yield {"down_mb": round(size["down"] / 1e6, 1), "path": "all of the service"} | spent


def _compared(path: PathTimes, bare: PathTimes) -> Row:
    return {
        "ms": round(1e3 * path.seconds, 2),
        "over_bare": round(path.seconds / bare.seconds, 2),
        "client_cpu_ms": round(1e3 * path.client_cpu / path.calls, 1),
        "server_cpu_ms": round(1e3 * path.server_cpu / path.calls, 1),
    }


def _server_seconds(server: ServerProcess) -> dict[str, float]:
    seconds = {name: server.metric("vitwire_stage_seconds_sum", stage=name) for name in _STAGES}
    return seconds | {"calls": server.metric("vitwire_stage_seconds_count", stage="send")}


def rendering(server: ServerProcess, side: int, options: Namespace) -> Iterator[Row]:
    """From an embedding to what an engine gets, in this process, beside base64 of the same bytes alone."""
    with Client(server.target) as client:
        model = client.model()
    embeddings = [_embedding(model, side, seed) for seed in range(2)]
    one = embeddings[0]
    alone = bytes(one._host())
    pieces = [b'{"messages":[{"content":[{', b"}]}]}"]

    def request() -> int:
        return sum(map(len, filled(pieces, [unencoded_image_part(one, model, uuid="u")])))

    ways: dict[str, Callable[[], object]] = {
        "base64 alone": lambda: b64encode(alone),
        "image_embeds, one image": lambda: image_embeds([one], model),
        "image_embeds, two images": lambda: image_embeds(embeddings, model),
        "image_part": lambda: image_part(one, model, uuid="u"),
        "request of the router": request,
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + 2 * options.turns):
        for name, render in ways.items():
            started = time.perf_counter()
            render()
            taken[name].append(time.perf_counter() - started)
    seconds = {name: median(each[1:]) for name, each in taken.items()}
    for name, each in seconds.items():
        over = round(each / seconds["base64 alone"], 3)
        yield {"rows_mb": round(len(alone) / 1e6, 1), "way": name, "ms": round(1e3 * each, 2), "over_base64": over}


def _embedding(model: Model, side: int, seed: int) -> Embedding:
    edge = max(1, side // (model.patch_size * model.merge_size))
    rows = np.random.default_rng(seed).integers(0, 1 << 15, (edge**2, model.embedding_width), dtype="<u2")
    grid = (1, edge * model.merge_size, edge * model.merge_size)
    return Embedding(rows, "bfloat16", model.deepstack_levels, Report(), grid)
