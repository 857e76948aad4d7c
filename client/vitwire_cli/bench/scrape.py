"""Metrics of servers, as differences over a load."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from urllib.parse import urlsplit
from urllib.request import urlopen

Readings = Mapping[tuple[str, str], float]
"""Values by the metric's name and its labels, as on the page."""

_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_TIMEOUT_SECONDS = 10.0
_PAGE_BYTES = 16 << 20
_BUSY = 0.9


def page_url(text: str) -> str:
    """The URL of a metrics page, from a URL or HOST:PORT. Raises ValueError."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a bracket that is not closed, or a port beyond 65,535
        valid = False
    if not valid:
        raise ValueError(f"--metrics {text}: expected http://HOST:PORT/metrics")
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/metrics"


def read(urls: Sequence[str]) -> Readings:
    """The sums over all pages. Raises OSError, naming the page that cannot be read."""
    totals: dict[tuple[str, str], float] = {}
    for url in urls:
        try:
            with urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310  # page_url checked the scheme
                text = answer.read(_PAGE_BYTES).decode()
        except (HTTPException, UnicodeDecodeError) as error:
            raise OSError(f"--metrics {url}: not a metrics page; use --metrics-port of the server") from error
        except OSError as error:
            raise OSError(f"--metrics {url}: {getattr(error, 'reason', error)}") from error
        samples = parse(text)
        if not any(name.startswith("vitwire_") for name, _ in samples):
            raise OSError(f"--metrics {url}: not a metrics page of vitwire-server")
        for key, value in samples.items():
            totals[key] = totals.get(key, 0.0) + value
    return totals


def parse(text: str) -> Readings:
    """Samples of Prometheus' text format; other lines are skipped."""
    found: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        if match := _SAMPLE.fullmatch(line):
            try:
                found[match[1], match[2] or ""] = float(match[3])
            except ValueError:
                continue
    return found


@dataclass(frozen=True, slots=True)
class Usage:
    """Changes in the metrics of `pages` servers within `seconds`."""

    before: Readings
    after: Readings
    seconds: float
    pages: int = 1

    def total(self, name: str, **labels: str) -> float:
        """By how much the samples of a metric with these labels increased."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            value - self.before.get((each, text), 0.0)
            for (each, text), value in self.after.items()
            if each == name and all(label in text.split(",") for label in wanted)
        )

    @property
    def device_busy(self) -> float:
        """Share of the time that the devices computed, the mean over all servers."""
        return self.total("vitwire_stage_seconds_sum", stage="execute") / self.seconds / self.pages

    def cores(self) -> dict[str, float]:
        """Processor cores in use, by process, summed over servers; without processes of their own, one sum."""
        name = "vitwire_process_cpu_seconds_total"
        labels = {text for each, text in self.after if each == name}
        used = {text: (self.after[name, text] - self.before.get((name, text), 0.0)) / self.seconds for text in labels}
        named = {_label(text, "process"): round(value, 3) for text, value in sorted(used.items())}
        return named or {"server": round(self.total("process_cpu_seconds_total") / self.seconds, 3)}

    @property
    def bound(self) -> str | None:
        """The saturated part: the device, or processes that use nearly one core each; None if neither is."""
        if self.device_busy >= _BUSY:
            return "device"
        full = [name for name, cores in self.cores().items() if name != "server" and cores / self.pages >= _BUSY]
        return f"processes {', '.join(full)}" if full else None

    def document(self) -> dict[str, object]:
        graph, eager, cache = (self.total("vitwire_items_total", path=path) for path in ("graph", "eager", "cache"))
        real, padding = (self.total("vitwire_tokens_total", kind=kind) for kind in ("real", "padding"))
        return {
            "device_busy": round(self.device_busy, 4),
            "cpu_cores": self.cores(),
            "graph_hit_rate": _share(graph, graph + eager),
            "cache_hit_rate": _share(cache, graph + eager + cache),
            "padding": _share(padding, real + padding),
            "rejected": round(self.total("vitwire_rejected_total")),
        }


def _label(text: str, name: str) -> str:
    found = re.search(rf'\b{name}="([^"]*)"', text)
    return found[1] if found else text


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
