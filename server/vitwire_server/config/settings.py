"""Settings of `vitwire-server serve`: what contradicts each other among the flags, and what follows from them."""

from pathlib import Path

from pydantic import model_validator

from vitwire_server.config.flags import MAX_MESSAGE_BYTES, Flags
from vitwire_server.config.ladder_files import token_counts

_MIB = 1 << 20
_LAST_PORT = 65535
_EVERY_ADDRESS = {"0.0.0.0", "::"}  # noqa: S104 - compared with, not listened on
_WIDEST_ROW_BYTES = 3 * 2 * 16 * 16 * 4
"""The widest pixel row of any family, in float32."""


class UsageError(Exception):
    """A flag, a variable or the TOML file is wrong; the message names it."""


class ServeSettings(Flags):
    """Serve a model's vision tower over gRPC.

    Every flag has a same-named environment variable (--max-queued-items, VITWIRE_MAX_QUEUED_ITEMS)
    and a same-named key in the TOML file that --config FILE reads. Flag beats variable beats file.
    """

    @model_validator(mode="after")
    def _budgets_fit(self) -> "ServeSettings":
        sizes = self.budget_sizes
        if sizes and max(sizes) > self.max_budget_tokens:
            raise ValueError(f"budgets: {max(sizes)} is more than max_budget_tokens {self.max_budget_tokens}")
        return self

    @model_validator(mode="after")
    def _precision_fits(self) -> "ServeSettings":
        if self.precision == "fp8" and self.dtype not in {"auto", "bfloat16"}:
            raise ValueError(f"--precision fp8 needs --dtype auto or bfloat16, not {self.dtype}")
        if self.precision == "fp8" and self.compile == "on":
            raise ValueError("--precision fp8 and --compile on cannot be used together")
        if self.precision != "fp8" and self.precision_floor != type(self).model_fields["precision_floor"].default:
            raise ValueError("--precision-floor needs --precision fp8")
        return self

    @model_validator(mode="after")
    def _devices_fit(self) -> "ServeSettings":
        if self.device_list and self.device != "auto":
            raise ValueError(f"--device {self.device} and --devices {self.devices} cannot be used together")
        last = max(self.port, self.metrics_port) + len(self.device_list) - 1
        if last > _LAST_PORT:
            raise ValueError(
                f"--devices: {len(self.device_list)} consecutive ports would end at {last}, above {_LAST_PORT}"
            )
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> "ServeSettings":
        ranges = self.port_ranges
        hosts = {self.host.strip("[]"), self.metrics_host.strip("[]")}
        if len(ranges) < 2 or (len(hosts) == 2 and not hosts & _EVERY_ADDRESS):
            return self
        grpc, pages = ranges["--port"], ranges["--metrics-port"]
        if both := set(grpc) & set(pages):
            needed = f"{_span(grpc)} for gRPC and {_span(pages)} for metrics"
            raise ValueError(f"--port and --metrics-port: port {min(both)} is needed twice ({needed})")
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> "ServeSettings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key must be set together")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        return self

    @property
    def adapter(self) -> tuple[str, Path] | None:
        """Name and directory of the adapter to merge."""
        name, _, folder = (self.lora or "").partition("=")
        return (name, Path(folder).expanduser()) if name else None

    @property
    def device_list(self) -> list[str]:
        """The device of each child process; empty without `--devices`."""
        return [] if self.devices == "none" else self.devices.split(",")

    @property
    def rpc_process_count(self) -> int | None:
        """Processes per device that serve RPCs; None leaves the number to `host.rpc_processes`."""
        return None if self.rpc_processes == "auto" else int(self.rpc_processes)

    @property
    def decode_process_count(self) -> int | None:
        """Processes per device that decode; None leaves the number to `host.decode_processes`."""
        return None if self.decode_processes == "auto" else int(self.decode_processes)

    @property
    def port_ranges(self) -> dict[str, range]:
        """Ports to listen on, by the flag that sets the first of them; leaves out port 0."""
        count = max(1, len(self.device_list))
        first = {"--port": self.port, "--metrics-port": self.metrics_port if self.metrics else 0}
        return {flag: range(port, port + count) for flag, port in first.items() if port}

    @property
    def budget_sizes(self) -> list[int] | None:
        """Tokens of each budget, ascending; None for automatic budgets."""
        return None if self.budgets in ("auto", "learn") else token_counts(self.budgets)

    @property
    def learns(self) -> bool:
        """Whether budgets follow the loads."""
        return self.budgets == "learn"

    @property
    def stored_bytes(self) -> int:
        """Maximum bytes of embeddings that wait on the device for a client; 0 if none do."""
        return self.store_bytes if self.nixl and self.cache_bytes else 0

    @property
    def message_bytes(self) -> int:
        """Upper bound of a message's bytes for every model family, used before the model is loaded."""
        return self.max_request_bytes or min(self.max_patches_per_item * _WIDEST_ROW_BYTES + _MIB, MAX_MESSAGE_BYTES)


def _span(ports: range) -> str:
    return str(ports[0]) if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
