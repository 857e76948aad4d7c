"""`vllm serve` that finds our plugin by the entry point of the installed package, as a user's does."""

import json
import os
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.engine.serving import EngineProcess, Settings, engine

ENGINE = f"{sys.executable} -m tests.engines.vllm.serve_in_process"
SECONDS = 120


def installed(folder: Path) -> Path:
    """A folder for PYTHONPATH in which Vitwire is installed, as far as its entry points go."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    (info := folder / "vitwire-0.1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vitwire\nVersion: 0.1\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in each.items()) for group, each in groups]
    (info / "entry_points.txt").write_text("".join(lines))
    return folder


@contextmanager
def served(model: Path, target: str, path: Path, plugins: str = "vitwire") -> Iterator[EngineProcess]:
    """vLLM's HTTP server in front of an engine of `in_process.py`. Raises Failed."""
    transfer = {
        "ec_connector": "VitwireECConnector",
        "ec_connector_module_path": "vitwire.integrations.vllm",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": {"target": target},
    }
    flags = {"--ec-transfer-config": json.dumps(transfer), "--max-model-len": "4096", "--enable-scale-out": ""}
    environment = {"PYTHONPATH": f"{path}:{os.environ['PYTHONPATH']}", "VLLM_PLUGINS": plugins}
    with engine(ENGINE, model, Settings(flags, environment), None) as process:
        process.wait(time.monotonic() + SECONDS)
        yield process
