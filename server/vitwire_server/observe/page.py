"""The status page: one self-contained document made from the Prometheus metrics.

It works without JavaScript; with it, the page refreshes itself every two seconds.
"""

import hashlib
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from time import gmtime, strftime

from vitwire_server.core.health import Health
from vitwire_server.core.models import Place
from vitwire_server.observe.readings import Readings

_KIB = 1024.0
_BAR_WIDTH, _BAR_HEIGHT = 240, 14


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def policy() -> str:
    """The Content-Security-Policy: only the page's style and script, and requests to itself."""
    digests = (hashlib.sha256(_asset(name).encode()).digest() for name in ("page.css", "page.js"))
    style, script = (f"'sha256-{b64encode(each).decode()}'" for each in digests)
    allowed = f"style-src {style}; script-src {script}; connect-src 'self'"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def page(readings: Readings, health: Health) -> str:
    model = next(iter(readings.labels("vitwire_model_info")), {})
    name = escape(model.get("model", "no model yet"))
    body = [
        _header(name, model, readings, health),
        '<div class="cards">',
        _ladder(readings),
        _counts("Fallbacks", "Items that ran eagerly, by reason", _fallbacks(readings)),
        _counts("Rejected", "Requests and items that were rejected or failed, by reason", _rejected(readings)),
        _facts("Cache", _cache(readings)),
        _facts("Served", _served(readings)),
        *_prepared(readings),
        _facts("Model", _model(model, readings)),
        "</div>",
    ]
    style, script = _asset("page.css"), _asset("page.js")
    return Template(_asset("page.html")).substitute(name=name, style=style, script=script, body="".join(body))


def _header(name: str, model: Mapping[str, str], readings: Readings, health: Health) -> str:
    state = health.state.value
    reason = f": {escape(health.reason)}" if health.reason else ""
    kind = f"{escape(model['model_type'])} on {escape(model['device'])}" if model else "loading"
    at = strftime("%Y-%m-%d %H:%M:%S", gmtime(readings.time))
    return (
        f'<header><h1>{name}</h1><div class="state {state}">{state}{reason}</div></header>'
        f"<p>{kind}, as of <time>{at} UTC</time></p>"
    )


def _key(style: str, name: str) -> str:
    drawn = f'<svg class="key {style}" viewBox="0 0 11 7" aria-hidden="true"><rect width="11" height="7"/></svg>'
    return f"{drawn}{escape(name)}"


def _ladder(readings: Readings) -> str:
    in_use = readings.by("vitwire_ladder_budgets", "budget")
    counts = readings.by("vitwire_graph_replays_total", "budget")
    replays = {size: counts.get(size, 0.0) for size, used in in_use.items() if used}
    hits = readings.by("vitwire_graph_hits_total", "budget")
    real = readings.by("vitwire_graph_tokens_total", "budget", kind="real")
    padding = readings.by("vitwire_graph_tokens_total", "budget", kind="padding")
    most = max((real.get(each, 0.0) + padding.get(each, 0.0) for each in replays), default=0.0)
    attention = _attention(readings)
    rows = []
    for budget in sorted(replays, key=int):
        used, unused = real.get(budget, 0.0), padding.get(budget, 0.0)
        cells = (_count(hits.get(budget, 0.0)), _count(replays[budget]), _share(unused, used + unused))
        figures = "".join(f"<td>{cell}</td>" for cell in (*cells, escape(attention.get(budget, ""))))
        rows.append(
            f'<tr><th scope="row">{escape(budget)}</th>{figures}<td class="bars">{_bar(used, unused, most)}</td></tr>'
        )
    if not rows:
        return _section("Ladder", "<p>No budget has a graph: everything runs eagerly.</p>", wide=True)
    head = "".join(
        f'<th scope="col">{each}</th>' for each in ("budget, tokens", "hits", "replays", "padding", "attention")
    )
    keys = f"tokens computed: {_key('first', 'real')} {_key('second', 'padding')}"
    table = (
        "<table><caption>Items and padding of each captured budget</caption>"
        f'<thead><tr>{head}<th scope="col" class="bars">{keys}</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )
    return _section("Ladder", table, wide=True)


def _bar(first: float, second: float, most: float) -> str:
    """A bar of two parts; its length is their sum relative to `most`."""
    scale = _BAR_WIDTH / most if most else 0.0
    width, rest = first * scale, second * scale
    return (
        f'<svg class="bar" viewBox="0 0 {_BAR_WIDTH} {_BAR_HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="ground" width="{_BAR_WIDTH}" height="{_BAR_HEIGHT}"/>'
        f'<rect class="real" width="{width:.2f}" height="{_BAR_HEIGHT}"/>'
        f'<rect class="padding" x="{width:.2f}" width="{rest:.2f}" height="{_BAR_HEIGHT}"/></svg>'
    )


def _attention(readings: Readings) -> dict[str, str]:
    """The attention backend of each budget; of several, up to which length of segments."""
    found: dict[str, dict[int, str]] = {}
    for labels in readings.labels("vitwire_budget_info"):
        found.setdefault(labels["budget"], {})[int(labels["segment_patches"])] = labels["attention"]
    shown = {}
    for budget, backends in found.items():
        *short, longest = sorted(backends)
        parts = [f"{backends[length]} up to {length} patches" for length in short]
        shown[budget] = ", ".join([*parts, backends[longest]])
    return shown


def _counts(title: str, caption: str, counts: Mapping[str, float]) -> str:
    rows = "".join(f'<tr><th scope="row">{escape(k)}</th><td>{_count(v)}</td></tr>' for k, v in counts.items())
    return _section(title, f"<table><caption>{caption}</caption><tbody>{rows}</tbody></table>")


def _fallbacks(readings: Readings) -> dict[str, float]:
    return {_words(k): v for k, v in readings.by("vitwire_eager_fallbacks_total", "reason").items()}


def _rejected(readings: Readings) -> dict[str, float]:
    refused = {f"full: {k}": v for k, v in readings.by("vitwire_rejected_total", "reason").items()}
    codes = readings.by("vitwire_requests_total", "code")
    failed = {_words(code): count for code, count in sorted(codes.items()) if code != "OK"}
    items = {f"item: {_words(code)}": n for code, n in readings.by("vitwire_items_failed_total", "code").items() if n}
    return {**refused, "deadline passed": readings.total("vitwire_expired_total"), **failed, **items}


def _cache(readings: Readings) -> dict[str, str]:
    hits, misses = (readings.total(f"vitwire_cache_{each}_total") for each in ("hits", "misses"))
    return {
        "hits": _count(hits),
        "misses": _count(misses),
        "hit rate": _share(hits, hits + misses),
        "evictions": _count(readings.total("vitwire_cache_evictions_total")),
        "on the host": _bytes(readings.total("vitwire_cache_bytes")),
        "on the device": _bytes(readings.total("vitwire_store_bytes")),
    }


def _served(readings: Readings) -> dict[str, str]:
    real, padding = (readings.total("vitwire_tokens_total", kind=each) for each in ("real", "padding"))
    admitted, held = (readings.total(f"vitwire_admitted_{each}") for each in ("items", "bytes"))
    return {
        "requests": _count(readings.total("vitwire_requests_total")),
        "in flight": _count(readings.total("vitwire_inflight_requests")),
        "items": _count(readings.total("vitwire_items_total")),
        "tokens": _count(real),
        "padding": _share(padding, real + padding),
        "waiting": f"{_count(readings.total('vitwire_queue_items'))} items",
        "waiting bytes": _bytes(readings.total("vitwire_queue_bytes")),
        "admitted": f"{_count(admitted)} of {_count(readings.total('vitwire_queue_limit_items'))} items",
        "admitted bytes": f"{_bytes(held)} of {_bytes(readings.total('vitwire_queue_limit_bytes'))}",
        "received": _bytes(readings.total("vitwire_received_bytes_total")),
        "delivered": _bytes(readings.total("vitwire_delivered_bytes_total")),
    }


def _prepared(readings: Readings) -> list[str]:
    """Pictures prepared by place, and their times, if the server prepares."""
    places = {each["what"]: _place(each) for each in readings.labels("vitwire_preparation_info")}
    if not places:
        return []
    busy, running, waiting = (readings.total(f"vitwire_decode_{each}") for each in ("busy", "processes", "waiting"))
    facts = {
        "pictures are prepared": places["prepare"],
        "JPEG files are decoded": places["decode"],
        **{
            f"prepared {_place(each)}": _count(readings.total("vitwire_prepared_total", **each))
            for each in readings.labels("vitwire_prepared_total")
        },
        "decoders": f"{_count(busy)} of {_count(running)} busy",
        "waiting for one": _count(waiting),
    }
    for each in readings.labels("vitwire_prepare_seconds_count"):
        if count := readings.total("vitwire_prepare_seconds_count", **each):
            mean = readings.total("vitwire_prepare_seconds_sum", **each) / count
            facts[f"{each['stage']} {_place(each)}, mean"] = f"{1e3 * mean:.3g} ms"
    return [_facts("Prepared", facts)]


def _place(labels: Mapping[str, str]) -> str:
    place = "on the device" if labels["where"] == Place.DEVICE else "on the CPU"
    reason = labels.get("reason")
    return f"{place} ({_words(reason)})" if reason else place


def _model(model: Mapping[str, str], readings: Readings) -> dict[str, str]:
    shown = {_words(key): escape(value) for key, value in model.items() if key != "model"}
    captured, dropped = (readings.total(f"vitwire_graphs_{each}") for each in ("captured", "dropped"))
    for each in readings.labels("vitwire_weights_info"):
        shown["weights"] = escape(each["fingerprint"])
    return shown | {"budgets captured": f"{captured:.0f} of {captured + dropped:.0f}"}


def _facts(title: str, facts: Mapping[str, str]) -> str:
    return _section(title, f"<dl>{''.join(f'<dt>{name}</dt><dd>{value}</dd>' for name, value in facts.items())}</dl>")


def _section(title: str, content: str, *, wide: bool = False) -> str:
    opened = f'<section class="wide" tabindex="0" aria-label="{title}">' if wide else "<section>"
    return f"{opened}<h2>{title}</h2>{content}</section>"


def _words(label: str) -> str:
    return label.replace("_", " ").lower()


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "\u2013"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < _KIB or unit == "GiB":
            return f"{value:.3g} {unit}"
        value /= _KIB
    raise AssertionError("the last unit holds everything")
