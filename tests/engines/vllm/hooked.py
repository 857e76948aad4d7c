"""`vllm serve` that finds our plugin by the entry point of the installed package, as a user's does."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.engine.serving import EngineProcess, Settings, engine
from bench.engine.setups import installed

ENGINE = f"{sys.executable} -m tests.engines.vllm.serve_in_process"
SECONDS = 120


@contextmanager
def served(
    model: Path, target: str, path: Path, plugins: str = "vitwire", *, tower: str = "ones", **more: str
) -> Iterator[EngineProcess]:
    """vLLM's HTTP server in front of an engine of `in_process.py`, with our connector if there is a target.

    tower: "vllm" for vLLM's own. more: further flags. Raises Failed.
    """
    transfer = {
        "ec_connector": "VitwireECConnector",
        "ec_connector_module_path": "vitwire.integrations.vllm",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": {"target": target},
    }
    flags = {"--ec-transfer-config": json.dumps(transfer)} if target else {}
    flags |= {"--max-model-len": "4096", "--enable-scale-out": ""}
    flags |= {"--limit-mm-per-prompt": '{"image": 4, "video": 2}'}
    flags |= {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    environment = installed(path) | {"VLLM_PLUGINS": plugins, "ENGINE_TOWER": tower}
    with engine(ENGINE, model, Settings(flags, environment), None) as process:
        process.wait(time.monotonic() + SECONDS)
        yield process
