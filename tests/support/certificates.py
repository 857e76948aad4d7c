"""Certificates made on the spot by trustme, in files as a server and its clients read them."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import trustme

YESTERDAY = datetime.now(UTC) - timedelta(days=1)
NAMES = ("localhost", "127.0.0.1")


@dataclass
class Authority:
    """A certificate authority of its own; `cert`, `key` and `root` are files in its folder."""

    folder: Path
    ca: trustme.CA = field(default_factory=trustme.CA)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.root.write_bytes(self.ca.cert_pem.bytes())

    @property
    def root(self) -> Path:
        return self.folder / "root.pem"

    @property
    def cert(self) -> Path:
        return self.folder / "cert.pem"

    @property
    def key(self) -> Path:
        return self.folder / "key.pem"

    def issue(self, *names: str, not_after: datetime | None = None) -> "Authority":
        """Write a certificate for these names, by default those of loopback, and its key."""
        made = self.ca.issue_cert(*(names or NAMES), not_after=not_after)
        self.replace(made.cert_chain_pems[0].bytes(), made.private_key_pem.bytes())
        return self

    def replace(self, cert: bytes, key: bytes) -> None:
        """Put others in the files' place, each at once, as certificate managers do."""
        for path, content in ((self.key, key), (self.cert, cert)):
            fresh = path.with_suffix(".new")
            fresh.write_bytes(content)
            fresh.replace(path)

    def credentials(self, client: "Authority | None" = None) -> grpc.ChannelCredentials:
        """Those of a client that trusts this authority, with the certificate of `client` if one is given."""
        own = (client.key.read_bytes(), client.cert.read_bytes()) if client else (None, None)
        return grpc.ssl_channel_credentials(self.root.read_bytes(), *own)
