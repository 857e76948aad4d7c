"""Settings of `vitwire-server serve`: what contradicts each other among the flags, and what follows from them."""

from typing import Self

from pydantic import model_validator

from vitwire_server.config.model_flags import DeviceSettings, GraphSettings, ModelSettings
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


class UsageError(Exception):
    """A flag, a variable or the TOML file is wrong; the message names it."""


class ServeSettings(  # pydantic takes the fields of the last class first
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
):
    """Serve a model's vision tower over gRPC.

    Every flag has a same-named environment variable (--max-queued-items, VITWIRE_MAX_QUEUED_ITEMS)
    and a same-named key in the TOML file that --config FILE reads. Flag beats variable beats file.
    """

    @model_validator(mode="after")
    def _devices_fit(self) -> Self:
        if self.device_list and self.device != "auto":
            raise ValueError(f"--device {self.device} and --devices {self.devices} cannot be used together")
        last = max(self.port, self.metrics_port) + len(self.device_list) - 1
        if last > _LAST_PORT:
            raise ValueError(
                f"--devices: {len(self.device_list)} consecutive ports would end at {last}, above {_LAST_PORT}"
            )
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        ranges = self.port_ranges
        hosts = {self.host.strip("[]"), self.metrics_host.strip("[]")}
        if len(ranges) < 2 or (len(hosts) == 2 and not hosts & _EVERY_ADDRESS):
            return self
        grpc, pages = ranges["--port"], ranges["--metrics-port"]
        if both := set(grpc) & set(pages):
            needed = f"{_span(grpc)} for gRPC and {_span(pages)} for metrics"
            raise ValueError(f"--port and --metrics-port: port {min(both)} is needed twice ({needed})")
        return self

    @property
    def port_ranges(self) -> dict[str, range]:
        """Ports to listen on, by the flag that sets the first of them; leaves out port 0."""
        count = max(1, len(self.device_list))
        first = {"--port": self.port, "--metrics-port": self.metrics_port if self.metrics else 0}
        return {flag: range(port, port + count) for flag, port in first.items() if port}


def _span(ports: range) -> str:
    return str(ports[0]) if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
