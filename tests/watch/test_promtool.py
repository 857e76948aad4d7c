"""What promtool says of the rules, the example configuration and a live page. Run by `make watch-test`."""

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from metric_pages import durations
from proxies import free_ports
from routers import CHAT, router
from servers import serving
from vitwire import Client, Item
from vitwire_server.demo.checkpoint import write_demo_checkpoint
from watchers import MONITORING

HERE = Path(__file__).parent
COLUMNS = 3 * 2 * 14 * 14

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: make watch-test")


def promtool(*words: str | Path, given: str = "") -> str:
    """What it printed. Fails on any complaint."""
    run = subprocess.run(["promtool", *words], input=given, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


def test_rules_and_configuration_are_valid() -> None:
    assert "SUCCESS" in promtool("check", "rules", MONITORING / "rules.yaml")
    assert "SUCCESS" in promtool("check", "config", MONITORING / "prometheus.yaml")


def test_every_alert_fires_on_what_it_is_for() -> None:
    assert "SUCCESS" in promtool("test", "rules", HERE / "rules_test.yaml")


@pytest.mark.parametrize("processes", ["1", "2"])
def test_names_of_a_live_page_follow_the_conventions(tmp_path: Path, processes: str) -> None:
    write_demo_checkpoint("qwen2_vl", tmp_path / "model")
    flags = ("--graphs", "simulated", "--budgets", "16,64", "--rpc-processes", processes)
    with serving(tmp_path / "model", *flags) as server, Client(server.target) as client:
        client.encode([Item(np.zeros((rows, COLUMNS), np.float32), (1, rows // 2, 2)) for rows in (16, 1024)])
        status, page = server.page("/metrics")
    assert status == 200
    assert durations(page) == {
        f"vitwire_{name}_seconds" for name in ("request", "stage", "delivery", "decode", "prepare")
    }
    assert promtool("check", "metrics", given=page) == ""


def test_names_of_a_router_follow_them_too() -> None:
    nobody, engine = free_ports(2)
    with router(f"127.0.0.1:{nobody}", f"http://127.0.0.1:{engine}") as proxy:
        with suppress(HTTPError):
            urlopen(Request(f"{proxy.url}{CHAT}", b"{}"), timeout=30)
        status, page = proxy.page("/metrics")
    assert status == 200
    assert 'vitwire_router_requests_total{code="' in page
    assert promtool("check", "metrics", given=page) == ""
