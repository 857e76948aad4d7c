"""A real Prometheus scrapes two real servers and two routers under load: rules, dashboard, alerts of what is broken.

Run by `make watch-test`.
"""

import base64
import json
import math
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from PIL import Image

from certificates import Authority
from encoded_files import saved
from proxies import free_ports
from routers import CHAT, RouterProcess, engine, router
from servers import ServerProcess, serving
from vitwire import Client, Item, Unavailable
from vitwire_server.demo.checkpoint import write_demo_checkpoint
from watchers import MONITORING, Prometheus, waited, watching

COLUMNS = 3 * 2 * 14 * 14
FLAGS = ("--graphs", "simulated", "--budgets", "16,64", "--cache-bytes", "10000000", "--dtype", "float32")
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
QUERIES = [(panel["title"], each["expr"]) for panel in DASHBOARD["panels"] for each in panel.get("targets", [])]
ON_CUDA = ["Device memory"]
"""Panels that are empty on a CPU."""
EXPIRES_IN = timedelta(days=2)

pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("prometheus-alertmanager")),
    reason="Prometheus or Alertmanager is not installed: make watch-test",
)


@dataclass(frozen=True)
class Watched:
    """Two servers under load, and what watches them."""

    prometheus: Prometheus
    servers: tuple[ServerProcess, ServerProcess]
    routers: tuple[RouterProcess, RouterProcess]

    def instance(self, number: int) -> str:
        return instance(self.servers[number])


def instance(process: ServerProcess) -> str:
    """How Prometheus names it."""
    return f"127.0.0.1:{process.metrics_port}"


def ask(proxy: RouterProcess, stopping: threading.Event) -> None:
    """Send questions about pictures until `stopping`."""
    picture = base64.b64encode(saved(Image.new("RGB", (56, 56)))).decode()
    content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}]
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": content}]}).encode()
    headers = {"content-type": "application/json"}
    while not stopping.wait(0.1):
        with suppress(HTTPError):  # of the router without an engine
            urlopen(Request(f"{proxy.url}{CHAT}", body, headers), timeout=30).close()


def load(target: str, root: Path | None, stopping: threading.Event) -> None:
    """Keep one server busy with items of every path, files and failures until `stopping`."""
    generator = np.random.default_rng()
    with Client(target, tls=root) as client:
        while not stopping.wait(0.1):
            sizes = (16, 1024, 16)
            items = [Item(generator.random((rows, COLUMNS), np.float32), (1, rows // 2, 2)) for rows in sizes]
            items[2] = Item(np.ones((16, COLUMNS), np.float32), (1, 8, 2), content_id="again")
            noise = Image.fromarray(generator.integers(0, 256, (56, 56, 3), np.uint8))
            files = [Item(encoded=saved(noise)), Item(encoded=b"not an image")]
            with suppress(Unavailable):  # killed
                list(client.iter_encode([*items, *files], return_exceptions=True))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    write_demo_checkpoint("qwen2_vl", folder / "model")
    stopping = threading.Event()
    with ExitStack() as stack:
        edges = stack.enter_context(serving(folder / "model", *FLAGS, "--rpc-processes", "2"))
        authority = Authority(folder / "pki").issue(not_after=datetime.now(UTC) + EXPIRES_IN)
        certificate = ("--tls-cert", str(authority.cert), "--tls-key", str(authority.key))
        alone = stack.enter_context(serving(folder / "model", *FLAGS, *certificate))
        nobody = f"http://127.0.0.1:{free_ports(1)[0]}"
        engines = stack.enter_context(engine()).url, nobody
        whole, broken = (stack.enter_context(router(edges.target, each)) for each in engines)
        loads = ((edges.target, None), (alone.target, authority.root))
        threads = [threading.Thread(target=load, args=(*each, stopping)) for each in loads]
        threads += [threading.Thread(target=ask, args=(each, stopping)) for each in (whole, broken)]
        jobs = {
            "vitwire": [instance(each) for each in (edges, alone)],
            "vitwire-router": [instance(each) for each in (whole, broken)],
        }
        prometheus = stack.enter_context(watching(jobs, folder))
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        stack.callback(stopping.set)
        waited(lambda: len(prometheus.query("rate(vitwire_items_total[10s]) > 0")) >= 6, "both servers are busy")
        yield Watched(prometheus, (edges, alone), (whole, broken))


def concrete(expression: str) -> str:
    """A query of the dashboard as Grafana sends it with all jobs and instances selected."""
    found = expression.replace("$__rate_interval", "10s").replace("$job", ".*").replace("$instance", ".*")
    assert "$" not in found, found
    return found


def test_servers_and_routers_are_scraped(watched: Watched) -> None:
    targets = watched.prometheus.get("targets")["activeTargets"]
    expected = {(instance(each), "up") for each in (*watched.servers, *watched.routers)}
    assert {(each["labels"]["instance"], each["health"]) for each in targets} == expected


@pytest.mark.parametrize(("title", "expression"), QUERIES, ids=[f"{title} {n}" for n, (title, _) in enumerate(QUERIES)])
def test_every_query_of_the_dashboard_has_values(watched: Watched, title: str, expression: str) -> None:
    def numbers() -> bool:
        series = watched.prometheus.query(concrete(expression))
        return any(math.isfinite(float(each["value"][1])) for each in series)

    if title in ON_CUDA:
        assert watched.prometheus.query(concrete(expression)) == []
    else:
        waited(numbers, f"{title}: {expression}", 30)


def test_the_dashboard_lists_jobs_and_instances(watched: Watched) -> None:
    for variable in DASHBOARD["templating"]["list"][1:]:
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
        assert match
        values = watched.prometheus.get(f"label/{match[2]}/values", **{"match[]": concrete(match[1])})
        instances = sorted(map(instance, (*watched.servers, *watched.routers)))
        expected = {"job": ["vitwire", "vitwire-router"], "instance": instances}
        assert values == expected[match[2]]


def test_every_rule_is_evaluated_and_every_record_has_series(watched: Watched) -> None:
    def records() -> bool:
        rules = watched.prometheus.rules("record")
        names = [each["name"] for each in rules]
        return all(each["health"] == "ok" for each in rules) and all(map(watched.prometheus.query, names))

    waited(records, "every recording rule has series", 30)
    for rule in watched.prometheus.rules("alert"):
        assert (rule["name"], rule["health"], rule.get("lastError", "")) == (rule["name"], "ok", "")


def test_counts_agree_with_the_servers(watched: Watched) -> None:
    """The identity of docs/metrics.md, as Prometheus stored it at one scrape."""
    parts = "sum by (instance) (vitwire_graph_hits_total) + sum by (instance) (vitwire_eager_fallbacks_total)"
    hits = "sum by (instance) (vitwire_cache_hits_total)"
    (weights,) = watched.prometheus.query("count by (fingerprint) (vitwire_weights_info)")
    with Client(watched.servers[0].target) as client:
        assert weights["metric"]["fingerprint"] == client.model().weights_fingerprint
    assert weights["value"][1] == "2"
    series = watched.prometheus.query(f"sum by (instance) (vitwire_items_total) - ({parts} + {hits})")
    assert len(series) == 2
    assert all(abs(float(each["value"][1])) <= 10 for each in series), "items of a scrape's moment"


def test_a_certificate_that_expires_soon_fires_the_alerts(watched: Watched) -> None:
    left = "vitwire_tls_certificate_expiry_timestamp_seconds - time()"
    seconds = {each["metric"]["instance"]: float(each["value"][1]) for each in watched.prometheus.query(left)}
    assert 0 < EXPIRES_IN.total_seconds() - seconds[watched.instance(1)] < 3600
    expected = {(f"VitwireCertificate{how}", watched.instance(1)) for how in ("Expiring", "NearlyExpired")}
    waited(lambda: expected <= watched.prometheus.firing(), "the alerts fire")
    assert not {each for each in watched.prometheus.firing() if "Certificate" in each[0]} - expected, "one has TLS"


def test_a_router_without_its_engine_fires_the_alert(watched: Watched) -> None:
    waited(lambda: ("VitwireRouterFailing", "") in watched.prometheus.firing(), "the alert fires")


def test_a_killed_server_fires_the_alert_and_reaches_alertmanager(watched: Watched) -> None:
    """The last test here: it takes one server away."""
    killed = ("VitwireDown", watched.instance(1))
    waited(lambda: watched.prometheus.query('vitwire_server_state{state="serving"} == 1'), "servers are ready")
    assert not {name for name, _ in watched.prometheus.firing()} & {"VitwireDown", "VitwireNoServer", "VitwireFailed"}
    os.kill(watched.servers[1].process.pid, signal.SIGKILL)
    waited(lambda: killed in watched.prometheus.firing(), "the alert fires")
    waited(lambda: killed in watched.prometheus.received(), "Alertmanager has the alert")
    names = {name for name, _ in watched.prometheus.firing()}
    assert ("VitwireDown", watched.instance(0)) not in watched.prometheus.firing()
    assert "VitwireNoServer" not in names, "the other still serves"
