"""The server's TLS certificate, and the authority that signs clients' certificates."""

import logging
import ssl
from collections.abc import Callable
from pathlib import Path

import grpc

from vitwire_server.core.files import read_regular
from vitwire_server.rpc.file_watch import FileWatch

_log = logging.getLogger(__name__)
_MOST_BYTES = 16 << 20


class Certificates:
    """PEM files. New connections use what was read last; open ones keep their certificate."""

    def __init__(
        self,
        cert: Path,
        key: Path,
        client_ca: Path | None = None,
        on_load: Callable[[float], None] = lambda _: None,
    ) -> None:
        """With `client_ca`, clients must have a certificate that it signed. Reads the files.

        Raises OSError or ValueError.

        `on_load` gets the Unix time at which the server's certificate expires, at each reading of the files.
        """
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self._on_load = on_load
        self._watch = FileWatch(cert, key, *([client_ca] if client_ca else []))
        self._first = self._load()
        self._renewed: grpc.ServerCertificateConfiguration | None = None

    @property
    def mutual(self) -> bool:
        """Whether clients need a certificate too."""
        return self._client_ca is not None

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`."""
        return grpc.dynamic_ssl_server_credentials(
            self._first,
            self._take_renewed,  # type: ignore[arg-type] # None is allowed, see grpc's docstring
            require_client_authentication=self.mutual,
        )

    def refresh(self) -> None:
        """Read the files again if one changed.

        A file that cannot be read, or a key that does not match, leaves the previous certificate in place until the
        files change again.
        """
        if not self._watch.changed():
            return
        try:
            self._renewed = self._load()
        except (OSError, ValueError) as error:
            _log.error("keeping the previous certificate: %s", error)
        else:
            _log.info("certificate reloaded from %s", self._cert)

    def _take_renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC's threads for each new connection; None keeps the current one."""
        renewed, self._renewed = self._renewed, None
        return renewed

    def _load(self) -> grpc.ServerCertificateConfiguration:
        pairs = [(read_regular(self._key, _MOST_BYTES), read_regular(self._cert, _MOST_BYTES))]
        roots = read_regular(self._client_ca, _MOST_BYTES) if self._client_ca else None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._cert, self._key, password="")
        except ssl.SSLError as error:
            raise ValueError(
                f"{self._cert} and {self._key} are not a certificate and its unencrypted key: {error}"
            ) from None
        if self._client_ca:
            try:
                context.load_verify_locations(self._client_ca)
            except ssl.SSLError as error:
                raise ValueError(f"{self._client_ca} contains no certificate: {error}") from None
        self._on_load(_expiry(self._cert))
        return grpc.ssl_server_certificate_configuration(pairs, root_certificates=roots)


def _expiry(cert: Path) -> float:
    """The Unix time at which the first certificate of a PEM file expires."""
    fields = ssl._ssl._test_decode_cert(str(cert))  # type: ignore[attr-defined]  # noqa: SLF001 - ssl has no other way
    return ssl.cert_time_to_seconds(fields["notAfter"])
