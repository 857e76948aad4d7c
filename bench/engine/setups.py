"""Setups of a comparison: engines with their own towers, or pairs of an engine and an encoder on one device."""

import json
import os
import re
import subprocess
import tempfile
import time
import tomllib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.engine import serving
from bench.engine.cores import MIB, cards, on_cores
from bench.engine.serving import EngineProcess, Failed, Settings

from servers import PYTHON, ServerProcess, end, spawn
from servers import serving as encoder

Row = dict[str, Any]
LOCAL = {"local", "again"}
"""Setups without encoders."""
_ROUTER = ("-c", "from vitwire_cli import main; main()", "router")
_MPS = "nvidia-cuda-mps-control"
_REQUEST = re.compile(r"-(\d+)(-[0-9a-f]{8})?$")
"""The end of a request's id in vLLM: our number, and random digits."""


@dataclass(slots=True)
class Setup:
    """What answers the requests of a stream."""

    name: str
    urls: list[str] = field(default_factory=list)
    engines: list[EngineProcess] = field(default_factory=list)
    encoders: list[ServerProcess] = field(default_factory=list)
    routers: list[ServerProcess] = field(default_factory=list)
    moments: Path | None = None
    """Lines of `watched`."""
    described: Row = field(default_factory=dict)

    @property
    def groups(self) -> dict[str, list[int]]:
        """Process ids by what they are."""
        named: dict[str, Sequence[ServerProcess]] = {"engine": self.engines, "encoder": self.encoders}
        named["router"] = self.routers
        return {name: [process.process.pid for process in each] for name, each in named.items() if each}

    def check(self) -> None:
        """Raises Failed if a process has ended."""
        for each in self.engines:
            if failure := each.failure():
                raise Failed(f"{self.name}: {failure}")
        for other in (*self.encoders, *self.routers):
            if (code := other.process.poll()) is not None:
                raise Failed(
                    f"{self.name}: encoder or router ended with {code}; its log ends in:\n{other.log()[-3000:]}"
                )

    def counters(self) -> dict[str, float]:
        """Sums over the engines."""
        found: dict[str, float] = {}
        for each in self.engines:
            for name, value in each.counters().items():
                found[name] = found.get(name, 0.0) + value
        return found

    def reached(self, label: str) -> dict[int, dict[str, float]]:
        """The moments of a stream's requests by number; none without a connector."""
        requests: list[Row] = []
        fetched: dict[str, float] = {}
        for line in self.moments.read_text().splitlines() if self.moments else ():
            row = json.loads(line)
            if "content" in row:
                fetched[row["content"]] = row["fetched"]
            elif f"{label}-" in row["request"]:
                requests.append(row)
        found = {}
        for row in requests:
            number = _REQUEST.search(row["request"])
            if number and row["of"] and all(each in fetched for each in row["of"]):
                last = max(fetched[each] for each in row["of"])
                found[int(number[1])] = {"accepted": row["accepted"], "queued": row["queued"], "fetched": last}
        return found


@contextmanager
def started(
    name: str, options: Namespace, settings: Settings, cores: Sequence[int], deadline: float
) -> Iterator[Setup]:
    """A setup that is ready; ended with the block. Raises Failed.

    Engines of `beside` start once the encoders are there, whose memory is taken from their KV blocks.
    """
    setup, began = Setup(name), time.monotonic()
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="beside-") as folder:
        with on_cores(cores):
            if name in LOCAL:
                _engines(stack, setup, options, settings, [_share(options.memory)] * options.devices)
            else:
                _pairs(stack, setup, options, settings, Path(folder))
        for each in setup.engines:
            each.wait(deadline)
        setup.described |= {
            "setup": name,
            "start_s": round(time.monotonic() - began, 1),
            "settings": str(settings),
            "kv_tokens": [each.kv_tokens() for each in setup.engines],
        }
        yield setup


def _engines(
    stack: ExitStack, setup: Setup, options: Namespace, settings: Settings, shares: Sequence[Settings]
) -> None:
    for index, share in enumerate(shares):
        device = None if options.tiny else index
        starting = serving.engine(options.engine, options.model, settings.changed(share), device)
        setup.engines.append(stack.enter_context(starting))
    setup.urls = [each.url for each in setup.engines]


def _pairs(stack: ExitStack, setup: Setup, options: Namespace, settings: Settings, folder: Path) -> None:
    """An encoder and an engine for each device, and a router unless vLLM's own front end calls the encoder."""
    mps = stack.enter_context(_mps(folder)) if options.mps else {}
    before = cards()
    prefix = environment(options, mps | (_percentage(options.mps) if options.mps else {}))
    for index in range(options.devices):
        device = "cpu" if options.tiny else f"cuda:{index}"
        words = ["--device", device, *options.server_flags.split()]
        setup.encoders.append(stack.enter_context(encoder(options.model, *words, wait=False, wrapper=prefix)))
    for each in setup.encoders:
        each.wait_for("ready: ", 300)
    held = [after["used_mib"] - card["used_mib"] for after, card in zip(cards(), before, strict=True)]
    setup.described["encoder_mib"] = held or None
    setup.moments = folder / "moments"
    setup.moments.touch()
    common = Settings({}, {**mps, "ENGINE_BENCH_MOMENTS": str(setup.moments)} | installed(folder))
    pool = serving.DELIVERY_BYTES // MIB if "--nixl" in options.server_flags else 0
    shares = []
    (key := folder / "key").write_bytes(os.urandom(32))
    for index, each in enumerate(setup.encoders):
        taken = (held[index] + pool) / before[index]["total_mib"] if held else 0.0
        share = _share(options.memory - taken).changed(common)
        keys = {"content_key_file": str(key)} if setup.name == "plugin" else {"allow_caller_embeds": True}
        shares.append(share.changed(Settings(serving.transfer(each.target, options.delivery, keys))))
    _engines(stack, setup, options, settings.changed(options.beside), shares)
    if setup.name == "plugin":
        return
    for each, engine in zip(setup.encoders, setup.engines, strict=True):
        routing = _router(each.target, engine.url, environment(options))
        setup.routers.append(stack.enter_context(routing))
    setup.urls = [f"http://{each.target}" for each in setup.routers]


def installed(folder: Path) -> dict[str, str]:
    """Variables of an engine that finds Vitwire's plugin, also where Vitwire is only on the path."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    (info := folder / "vitwire-0.1.dist-info").mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vitwire\nVersion: 0.1\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in each.items()) for group, each in groups]
    (info / "entry_points.txt").write_text("".join(lines))
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}


def _share(memory: float) -> Settings:
    return Settings({"--gpu-memory-utilization": f"{memory:.4f}"})


@contextmanager
def _router(target: str, engine_url: str, prefix: Sequence[str]) -> Iterator[ServerProcess]:
    words = ["--port", "0", "--target", target, "--engine-url", engine_url, "--mode", "reference"]
    with tempfile.NamedTemporaryFile(prefix="router-", suffix=".log") as log:
        process = spawn(_ROUTER, words, log.file, prefix)
        router = ServerProcess(process, Path(log.name))
        try:
            router.port = router.metrics_port = int(router.wait_for(r"listening on [\d.]+:(\d+)")[1])
            yield router
        finally:
            end(process, 20)


def _percentage(percent: int) -> dict[str, str]:
    return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)} if percent < 100 else {}


@contextmanager
def _mps(folder: Path) -> Iterator[dict[str, str]]:
    """The variables of clients of an MPS daemon, which ends with the block. Raises Failed without its program."""
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-log")}
    for each in variables.values():
        Path(each).mkdir()
    # A daemon that sees some devices only would number them anew, for clients that see the same ones.
    around = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | variables
    control = partial(subprocess.run, env=around, timeout=30, stdout=subprocess.DEVNULL)
    try:
        control([_MPS, "-d"], check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise Failed(f"--mps: {error}") from error
    try:
        yield variables
    finally:
        control([_MPS], input=b"quit\n", check=False)


def environment(options: Namespace, more: dict[str, str] | None = None) -> list[str]:
    """Prefix of commands that run what the server runs; empty if they need none."""
    variables = dict(more or {})
    if options.server_pythonpath:
        variables["PYTHONPATH"] = options.server_pythonpath
    return ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []


def written(options: Namespace) -> Path:
    """The checkpoint with the language model that is asked for; written if it is not there."""
    model: Path = options.model
    if options.language != "2b":
        model = model.with_name(f"{model.name}-{options.language}")
    if not model.exists():
        words = [PYTHON, "-m", "bench.engine.checkpoint", str(model), "--language", options.language]
        words += ["--tiny"] if options.tiny else ["--device", "cuda"]
        subprocess.run([*environment(options), *words], check=True, stdout=2)  # stdout is the benchmark's
    return model
