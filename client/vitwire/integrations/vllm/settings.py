"""Settings of the EC connector: `ec_connector_extra_config` of vLLM's `--ec-transfer-config`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import grpc
from msgspec import Meta, Struct, ValidationError, convert

from vitwire._delivery.nixl import POOL_BYTES, Delivery
from vitwire._transport.channel import checked_target
from vitwire.client import Client
from vitwire.embeddings import DType


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Checked settings; every field is a key of the extra config."""

    target: str
    """As for `vitwire.Client`."""
    tls: bool | str = False
    """true, or a PEM file of root certificates."""
    tls_cert: str = ""
    tls_key: str = ""
    """PEM files of a client certificate."""
    token: str = ""
    token_file: str = ""
    """File with the token; vLLM logs its configuration, so prefer this to `token`."""
    timeout: Annotated[float, Meta(ge=1e-3)] = 20.0
    """Seconds in which an embedding has to arrive."""
    wait: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds for which content that is not cached is asked for again before its requests fail."""
    delivery: Delivery = "auto"
    delivery_bytes: Annotated[int, Meta(ge=1)] = POOL_BYTES
    """As for `vitwire.Client`; with NIXL this is memory of each worker's device."""
    output_type: DType | None = None
    """The type of rows that the embeddings were requested in; default: the server's dtype."""
    held_tokens: Annotated[int, Meta(ge=0)] = 0
    """Rows that are fetched ahead, per worker; default: the size of vLLM's encoder cache."""
    threads: Annotated[int, Meta(ge=1)] = 32
    """Simultaneous fetches per worker."""

    @classmethod
    def of(cls, extra: Mapping[str, object]) -> "Settings":
        """Raises ValueError that names the key."""
        try:
            return convert(extra, cls)
        except ValidationError as error:
            raise ValueError(f"ec_connector_extra_config: {error}") from error

    def __post_init__(self) -> None:
        checked_target(self.target)
        if self.token and self.token_file:
            raise ValueError("set token or token_file, not both")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key must be set together")
        for name in ("token_file", "tls_cert", "tls_key"):
            if (path := getattr(self, name)) and not Path(path).is_file():
                raise ValueError(f"{name}: {path!r} is not a file")

    def client(self, device: str | None) -> Client:
        """A client that delivers to this device if NIXL is used. Raises ValueError and OSError."""
        return Client(
            self.target,
            tls=self._credentials(),
            token=self.token or (Path(self.token_file).read_text("utf-8").strip() if self.token_file else None),
            timeout=self.timeout,
            affinity=True,  # rows are fetched from the replica that the router had them cached by
            delivery=self.delivery,
            device=None if self.delivery == "stream" else device,
            delivery_bytes=self.delivery_bytes,
        )

    def _credentials(self) -> bool | str | grpc.ChannelCredentials:
        if not self.tls_cert:
            return self.tls
        ca = Path(self.tls).read_bytes() if isinstance(self.tls, str) else None
        return grpc.ssl_channel_credentials(ca, Path(self.tls_key).read_bytes(), Path(self.tls_cert).read_bytes())
