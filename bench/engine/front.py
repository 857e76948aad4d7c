"""vLLM's HTTP server around an engine of this process, and a `vitwire router` before it."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bench.engine.options import LOCAL
from bench.engine.photos import MODEL, Photos, session

from servers import ServerProcess, end, spawn

_ROUTER = ("-c", "from vitwire_cli import main; main()", "router")
_STOP_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Front:
    """The HTTP server of an engine, and routers before it."""

    url: str
    session: Any
    routers: Mapping[str, str]
    """Addresses by mode."""

    @classmethod
    @asynccontextmanager
    async def of(
        cls, engine: Any, model: Path, target: str, environment: Sequence[str], modes: Iterable[str]
    ) -> AsyncIterator[Self]:
        """Start an HTTP server, and a router of each mode in front of it.

        target, environment: the server's address, and the prefix of commands that run what it runs.
        """
        async with AsyncExitStack() as stack:
            url = await stack.enter_async_context(http_server(engine, model))
            started = {mode: stack.enter_context(routed(target, url, environment, "--mode", mode)) for mode in modes}
            routers = {mode: f"http://{each.target}" for mode, each in started.items()}
            yield cls(url, await stack.enter_async_context(session()), routers)

    def route(self, name: str) -> Photos:
        """The route of this name into the engine."""
        return Photos(self.url if name in LOCAL else self.routers[name], self.session)


@asynccontextmanager
async def http_server(engine: Any, model: Path) -> AsyncIterator[str]:
    """Address of vLLM's OpenAI server, which runs in this event loop as in `vllm serve`."""
    import uvicorn  # noqa: PLC0415 - comes with vLLM
    from vllm.entrypoints.common.cli_args import make_arg_parser  # noqa: PLC0415 - seconds
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state  # noqa: PLC0415 - as above
    from vllm.entrypoints.launchers.app import build_app  # noqa: PLC0415 - as above
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415 - as above

    class Server(uvicorn.Server):
        """Leaves signals to the benchmark."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    words = ["--model", str(model), "--served-model-name", MODEL]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    tasks = await engine.get_supported_tasks()
    app = build_app(arguments, tasks, engine.model_config)
    await init_app_state(engine, app.state, arguments, tasks)
    # Of a host, not a socket: asyncio would not set TCP_NODELAY then, as uvloop does under `vllm serve`.
    server = Server(
        uvicorn.Config(
            app, host="127.0.0.1", port=0, log_level="warning", access_log=False, timeout_graceful_shutdown=5
        )
    )
    app.state.server = server  # vLLM ends it when the engine has died
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():  # noqa: ASYNC110  # uvicorn has no event for it
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@contextmanager
def routed(target: str, engine_url: str, environment: Sequence[str], *flags: str) -> Iterator[ServerProcess]:
    """A router; `environment` is the prefix of commands that run what the server runs."""
    words = ["--port", "0", "--target", target, "--engine-url", engine_url, *flags]
    with tempfile.NamedTemporaryFile(prefix="router-", suffix=".log") as log:
        process = spawn(_ROUTER, words, log.file, environment)
        router = ServerProcess(process, Path(log.name))
        try:
            router.port = router.metrics_port = int(router.wait_for(r"listening on [\d.]+:(\d+)")[1])
            yield router
        finally:
            end(process, _STOP_SECONDS)
