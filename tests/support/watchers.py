"""A real Prometheus and a real Alertmanager, as Debian packages them."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from proxies import free_ports

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
_SECONDS = 90
Document = dict[str, Any]


def waited(condition: Callable[[], Any], what: str, seconds: float = _SECONDS) -> Any:
    """The first result of `condition` that is true. Raises TimeoutError without one."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.1)
    return result


def fetched(url: str) -> Any:
    """A JSON document; None while nobody listens. Raises RuntimeError with the body of an error."""
    try:
        with urlopen(url, timeout=20) as answer:
            return json.load(answer)
    except HTTPError as error:
        if error.code == 503:  # starting
            return None
        raise RuntimeError(f"{url}: {error.code}: {error.read().decode()}") from error
    except (URLError, ConnectionError):
        return None


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus and its Alertmanager, by their addresses."""

    url: str
    alertmanager: str

    def get(self, path: str, **query: str) -> Any:
        """The data of an answer of the HTTP API."""
        return fetched(f"{self.url}/api/v1/{path}?{urlencode(query)}")["data"]

    def query(self, expression: str) -> list[Document]:
        """The series of an expression now, each with `metric` and `value`."""
        found: list[Document] = self.get("query", query=expression)["result"]
        return found

    def rules(self, kind: str) -> list[Document]:
        """The rules of a kind (alert, record) as Prometheus evaluated them."""
        return [rule for group in self.get("rules", type=kind)["groups"] for rule in group["rules"]]

    def firing(self) -> set[tuple[str, str]]:
        """Name and instance of the alerts that fire."""
        alerts = self.get("alerts")["alerts"]
        return {
            (alert["labels"]["alertname"], alert["labels"].get("instance", ""))
            for alert in alerts
            if alert["state"] == "firing"
        }

    def received(self) -> set[tuple[str, str]]:
        """Name and instance of the alerts that Alertmanager has."""
        alerts = fetched(f"{self.alertmanager}/api/v2/alerts") or []
        return {(alert["labels"]["alertname"], alert["labels"].get("instance", "")) for alert in alerts}


def documented(jobs: Mapping[str, list[str]], alertmanager: str, rules: Path) -> Document:
    """The example of deploy/ with these targets by job, and often enough for a test."""
    config: Document = yaml.safe_load((MONITORING / "prometheus.yaml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(rules)]
    config["alerting"]["alertmanagers"] = [{"static_configs": [{"targets": [alertmanager]}]}]
    config["scrape_configs"] = [
        {"job_name": job, "static_configs": [{"targets": targets}]} for job, targets in jobs.items()
    ]
    return config


def impatient(rules: Document) -> Document:
    """The rules, with alerts that fire after two seconds."""
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = "2s"
    return rules


@contextmanager
def watching(jobs: Mapping[str, list[str]], folder: Path) -> Iterator[Prometheus]:
    """Prometheus with the rules of deploy/ and an Alertmanager, both ready, on free ports."""
    own, alertmanager = (f"127.0.0.1:{port}" for port in free_ports(2))
    rules, config, routes = folder / "rules.yaml", folder / "prometheus.yaml", folder / "alertmanager.yaml"
    rules.write_text(yaml.safe_dump(impatient(yaml.safe_load((MONITORING / "rules.yaml").read_text()))))
    config.write_text(yaml.safe_dump(documented(jobs, alertmanager, rules)))
    routes.write_text(yaml.safe_dump({"route": {"receiver": "none"}, "receivers": [{"name": "none"}]}))
    commands = (
        ("prometheus-alertmanager", routes, alertmanager, "--storage.path", "--cluster.listen-address="),
        ("prometheus", config, own, "--storage.tsdb.path", "--log.level=warn"),
    )
    with ExitStack() as stack:
        for name, file, address, storage, extra in commands:
            flags = [f"--config.file={file}", f"--web.listen-address={address}", f"{storage}={folder / name}", extra]
            stack.enter_context(_running([name, *flags], folder / f"{name}.log"))
        running = Prometheus(f"http://{own}", f"http://{alertmanager}")
        waited(lambda: fetched(f"{running.url}/api/v1/status/buildinfo"), "Prometheus answers")
        yield running


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)
