"""Settings of the EC connector: `ec_connector_extra_config` of vLLM's `--ec-transfer-config`."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import grpc

from vitwire._delivery.nixl import DELIVERIES, POOL_BYTES, Delivery
from vitwire._transport.channel import checked_target
from vitwire.aio import AsyncClient
from vitwire.client import Client
from vitwire.content_ids import read_content_key
from vitwire.embeddings import OUTPUT_TYPES, DType
from vitwire.shared.named_files import naming

_WHERE = "ec_connector_extra_config"
_TYPES: dict[str, tuple[type, ...]] = {
    "target": (str,),
    "tls": (bool, str),
    "tls_cert": (str,),
    "tls_key": (str,),
    "token": (str,),
    "token_file": (str,),
    "timeout": (int, float),
    "wait": (int, float),
    "delivery": (str,),
    "delivery_bytes": (int,),
    "output_type": (str,),
    "held_tokens": (int,),
    "threads": (int,),
    "content_key_file": (str,),
    "accept_seconds": (int, float),
    "allow_caller_embeds": (bool,),
    "fallback": (str,),
}
_FALLBACKS = ("faster", "unavailable")
_LEAST = {"timeout": 1e-3, "accept_seconds": 1e-3, "wait": 0, "delivery_bytes": 1, "held_tokens": 0, "threads": 1}


@dataclass(frozen=True, slots=True)
class Settings:
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
    timeout: float = 20.0
    """Seconds in which an embedding has to arrive."""
    wait: float = 0.0
    """Seconds for which content that is not cached is asked for again before its requests fail."""
    delivery: Delivery = "auto"
    delivery_bytes: int = POOL_BYTES
    """As for `vitwire.Client`; with NIXL this is memory of each worker's device."""
    output_type: DType | None = None
    """The type of rows that the embeddings were requested in; default: the server's dtype."""
    held_tokens: int = 0
    """Rows that are fetched ahead, per worker; default: the size of vLLM's encoder cache."""
    threads: int = 32
    """Simultaneous fetches per worker."""
    content_key_file: str = ""
    """File with the secret of the front end's content ids, 32 bytes or more; default: random in each process."""
    accept_seconds: float = 1.0
    """Seconds within which the server must accept an image of the front end, before the engine's tower encodes it."""
    allow_caller_embeds: bool = False
    """Whether requests may bring embeddings, references and uuids: only if no stranger reaches vLLM's port."""
    fallback: str = "faster"
    """When the engine's tower encodes what the encoder could: "faster", if the encoder is unavailable, or would be done
    later; "unavailable", only then."""

    @classmethod
    def of(cls, extra: Mapping[str, object]) -> "Settings":
        """Raises ValueError that names the key."""
        for key, value in extra.items():
            if key not in _TYPES:
                raise ValueError(f"{_WHERE}: unknown key {key!r}; the keys are {', '.join(_TYPES)}")
            if not isinstance(value, _TYPES[key]) or (isinstance(value, bool) and bool not in _TYPES[key]):
                kinds = " or ".join(kind.__name__ for kind in _TYPES[key])
                raise ValueError(f"{_WHERE}.{key}: expected {kinds}, got {value!r}")
        if not extra.get("target"):
            raise ValueError(f"{_WHERE}.target: set the address of the Vitwire server, such as 'localhost:50051'")
        settings = cls(**extra)  # type: ignore[arg-type]  # checked above
        settings._check()
        return settings

    def _check(self) -> None:
        checked_target(self.target)
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{_WHERE}.{name}: must be at least {least}, got {value}")
        if self.delivery not in DELIVERIES:
            raise ValueError(f"{_WHERE}.delivery: expected one of {', '.join(DELIVERIES)}, got {self.delivery!r}")
        if self.fallback not in _FALLBACKS:
            raise ValueError(f"{_WHERE}.fallback: expected one of {', '.join(_FALLBACKS)}, got {self.fallback!r}")
        if self.output_type not in (None, *OUTPUT_TYPES):
            raise ValueError(f"{_WHERE}.output_type: expected one of {', '.join(OUTPUT_TYPES)}")
        if self.token and self.token_file:
            raise ValueError(f"{_WHERE}: set token or token_file, not both")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError(f"{_WHERE}: tls_cert and tls_key must be set together")
        for name in ("token_file", "tls_cert", "tls_key", "content_key_file"):
            if (path := getattr(self, name)) and not Path(path).is_file():
                raise ValueError(f"{_WHERE}.{name}: {path!r} is not a file")

    def client(self, device: str | None) -> Client:
        """A client that delivers to this device if NIXL is used. Raises ValueError and OSError."""
        return Client(
            **self._connection(),
            timeout=self.timeout,
            delivery=self.delivery,
            device=None if self.delivery == "stream" else device,
            delivery_bytes=self.delivery_bytes,
        )

    def uploading_client(self) -> AsyncClient:
        """A client that gives up at once, as the engine can encode an image itself. Raises ValueError and OSError."""
        return AsyncClient(**self._connection(), timeout=self.timeout, max_retries=0)

    def content_key(self) -> bytes:
        """The secret of content ids; a random one without a file. Raises ValueError."""
        if not self.content_key_file:
            return secrets.token_bytes(32)
        file = Path(self.content_key_file)
        with naming(f"{_WHERE}.content_key_file", file):
            return read_content_key(file)

    def _connection(self) -> dict[str, Any]:
        token = Path(self.token_file).read_text("utf-8").strip() if self.token_file else None
        # Rows are fetched from the replica that has them: the one to which an upload with this content id goes.
        return {"target": self.target, "tls": self._credentials(), "token": self.token or token, "affinity": True}

    def _credentials(self) -> bool | str | grpc.ChannelCredentials:
        if not self.tls_cert:
            return self.tls
        ca = Path(self.tls).read_bytes() if isinstance(self.tls, str) else None
        return grpc.ssl_channel_credentials(ca, Path(self.tls_key).read_bytes(), Path(self.tls_cert).read_bytes())


assert _TYPES.keys() == {field.name for field in fields(Settings)}
