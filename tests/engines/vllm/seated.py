"""The benchmark's process of an engine, with the engine of `in_process.py` in place of vLLM's, which needs a GPU.

All else in it is real: vLLM's front end, HTTP server, scheduler and connector, and the Vitwire servers.
"""

from multiprocessing.connection import Connection
from typing import Any

import tests.engines.vllm.cpu_platform  # noqa: F401  # before the rest of vLLM
from bench.engine import seat
from tests.engines.vllm.in_process import CoreClient
from vllm.v1.engine.core_client import EngineCoreClient

serve_with_vllm = seat.serve


def serve(pipe: Connection, place: Any) -> None:
    """In place of `seat.serve`."""
    EngineCoreClient.make_async_mp_client = CoreClient
    serve_with_vllm(pipe, place)
