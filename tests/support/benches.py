"""Run a benchmark as `make` does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def last_line(*words: str, code: int = 0) -> dict[str, Any]:
    """The document that ends a benchmark's output; `fault` is what it says instead."""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("client", "gateway", "server", "tests/support", "."))
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr + done.stdout
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {"fault": done.stderr}
    return document
