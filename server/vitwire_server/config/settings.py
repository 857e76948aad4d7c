"""Settings of `vitwire-server serve`: what contradicts each other among the flags, and what follows from them."""

import re
import sys
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

from vitwire_server.config.model_flags import ConfigurationSettings, DeviceSettings, GraphSettings, ModelSettings
from vitwire_server.config.service_flags import (
    AccessSettings,
    AddressSettings,
    CacheSettings,
    DebugSettings,
    DeliverySettings,
    FileSettings,
    LimitSettings,
    TimeoutSettings,
)

_LAST_PORT = 65535
_EVERY_ADDRESS = {"0.0.0.0", "::"}  # noqa: S104 - compared with, not listened on
_FORMS = {
    "lora": (r"[\w.-]{1,64}=.+", "NAME=DIR, with a name of up to 64 letters, digits, dots and hyphens"),
    "device": (r"auto|cpu|cuda(:\d{1,3})?", "auto, cpu, cuda or cuda:N"),
    "devices": (
        r"none|(cpu|cuda(:\d{1,3})?)(,(cpu|cuda(:\d{1,3})?))*",
        "none, or devices such as cuda:0,cuda:1",
    ),
    "otlp_endpoint": (r"(https?://)?[^/\s]+/?", "host:port, http://host:port or https://host:port"),
}
"""Patterns of settings, and what they allow in words."""
_PROCESSES = {"rpc_processes": (1, 64), "decode_processes": (0, 256)}
"""Least and most processes per device; more than the least need Linux."""


class UsageError(Exception):
    """A flag, a variable or the TOML file is wrong; the message names it."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings(  # dataclasses take the fields of the last class first
    DebugSettings,
    DeliverySettings,
    AccessSettings,
    TimeoutSettings,
    CacheSettings,
    FileSettings,
    LimitSettings,
    GraphSettings,
    DeviceSettings,
    AddressSettings,
    ModelSettings,
    ConfigurationSettings,
):
    """Serve a model's vision tower over gRPC.

    Every flag has a same-named environment variable (--max-queued-items, VITWIRE_MAX_QUEUED_ITEMS)
    and a same-named key in the TOML file that --config FILE reads. Flag beats variable beats file.
    """

    prefix: ClassVar[str] = "VITWIRE_"

    def __post_init__(self) -> None:
        """Raises ValueError for settings that are wrong or contradict each other."""
        self._check_words()
        self._check_tls()
        self._check_budgets()
        self._check_devices()
        self._check_ports()

    def _check_words(self) -> None:
        for name, (pattern, expected) in _FORMS.items():
            value = getattr(self, name)
            if value is not None and not re.fullmatch(pattern, value):
                raise ValueError(f"{_flag(name)}: expected {expected} (got {value!r})")
        for name, (least, most) in _PROCESSES.items():
            value = getattr(self, name)
            if value != "auto" and not (re.fullmatch(r"\d{1,4}", value, re.ASCII) and least <= int(value) <= most):
                raise ValueError(f"{_flag(name)}: expected auto or a number from {least} to {most} (got {value!r})")
            if value not in {"auto", str(least)} and sys.platform != "linux":
                raise ValueError(f"{_flag(name)}: more than {least} needs Linux")

    def _check_tls(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key must be set together")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        if self.http_port is not None and self.tls_client_ca and not self.auth_tokens_file:
            raise ValueError("--http-port asks for no certificates: with --tls-client-ca, set --auth-tokens-file too")

    def _check_budgets(self) -> None:
        sizes = self.budget_sizes
        if sizes and max(sizes) > self.max_budget_tokens:
            raise ValueError(f"--budgets: {max(sizes)} is more than --max-budget-tokens {self.max_budget_tokens}")

    def _check_devices(self) -> None:
        if self.device_list and self.device != "auto":
            raise ValueError(f"--device {self.device} and --devices {self.devices} cannot be used together")
        last = max(self.port, self.metrics_port, self.http_port or 0) + len(self.device_list) - 1
        if last > _LAST_PORT:
            raise ValueError(
                f"--devices: {len(self.device_list)} consecutive ports would end at {last}, above {_LAST_PORT}"
            )

    def _check_ports(self) -> None:
        if self.http_port is None and "http_host" in self.given:
            raise ValueError("--http-host needs --http-port")
        for (one, ports), (other, others) in combinations(self.port_ranges.items(), 2):
            hosts = {self.hosts[one].strip("[]"), self.hosts[other].strip("[]")}
            both = set(ports) & set(others) - {0}
            if both and (len(hosts) == 1 or hosts & _EVERY_ADDRESS):
                raise ValueError(f"port {min(both)} is needed twice: {one} {_span(ports)}, {other} {_span(others)}")

    @property
    def hosts(self) -> dict[str, str]:
        """Addresses to listen on, by the flag of their port."""
        return {"--port": self.host, "--metrics-port": self.metrics_host, "--http-port": self.http_host}

    @property
    def port_ranges(self) -> dict[str, range]:
        """Ports to listen on, by the flag that sets the first of them; 0 stands for any free ones."""
        count = max(1, len(self.device_list))
        metrics_port = self.metrics_port if self.metrics else None
        first = {"--port": self.port, "--metrics-port": metrics_port, "--http-port": self.http_port}
        return {flag: range(port, port + count if port else 1) for flag, port in first.items() if port is not None}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _span(ports: range) -> str:
    return str(ports[0]) if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
