"""Authentication of callers: by tokens and certificates, in files that are read again while the server runs."""

import hashlib
import logging
import re
import ssl
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import grpc

from vitwire.shared.fairness.hosts import peer_name
from vitwire.shared.named_files import naming
from vitwire_flags.regular_files import WatchedFiles, read_regular
from vitwire_server.rpc.grpc_types import Context, Continuation, RpcHandler

_log = logging.getLogger(__name__)
_MOST_BYTES = 16 << 20
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
_SHORT = 16
_HEALTH = "/grpc.health.v1.Health/"
_SCHEME = "bearer "
_token_name: ContextVar[str] = ContextVar("token_name", default="")
IS_REFUSED: ContextVar[bool] = ContextVar("is_refused", default=False)
"""Whether the RPC of this task has no valid token."""


class Certificates(WatchedFiles):
    """The server's certificate and the authority that signs clients' certificates, in PEM files.

    New connections use what was read last; open ones keep their certificate.
    """

    def __init__(
        self,
        cert: Path,
        key: Path,
        client_ca: Path | None = None,
        on_load: Callable[[float], None] = lambda _: None,
    ) -> None:
        """With `client_ca`, clients must have a certificate that it signed. Reads the files.

        Raises ValueError with the flag and the file that cannot be used.

        `on_load` gets the Unix time at which the server's certificate expires, at each reading of the files.
        """
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self._on_load = on_load
        super().__init__("certificate", cert, key, *([client_ca] if client_ca else []))
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

    def _read_again(self) -> None:
        self._renewed = self._load()
        _log.info("certificate reloaded from %s", self._cert)

    def _take_renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC's threads for each new connection; None keeps the current one."""
        renewed, self._renewed = self._renewed, None
        return renewed

    def _load(self) -> grpc.ServerCertificateConfiguration:
        with naming("--tls-key", self._key):
            key = read_regular(self._key, _MOST_BYTES)
        with naming("--tls-cert", self._cert):
            pairs = [(key, read_regular(self._cert, _MOST_BYTES))]
            # ssl has no other way to read the end of the first certificate
            fields = ssl._ssl._test_decode_cert(str(self._cert))  # type: ignore[attr-defined]  # noqa: SLF001
        context, roots = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), None
        with naming(f"--tls-cert {self._cert} --tls-key", self._key):
            context.load_cert_chain(self._cert, self._key, password="")
        if self._client_ca:
            with naming("--tls-client-ca", self._client_ca):
                roots = read_regular(self._client_ca, _MOST_BYTES)
                context.load_verify_locations(self._client_ca)
        self._on_load(ssl.cert_time_to_seconds(fields["notAfter"]))
        return grpc.ssl_server_certificate_configuration(pairs, root_certificates=roots)


class Tokens(WatchedFiles):
    """The tokens in a file.

    One token a line, optionally followed by its name; `#` starts a comment line. Only digests of the tokens
    are kept. `own`, if not empty, is the token of a process of this server, valid while there is any.
    """

    def __init__(self, path: Path, own: str = "") -> None:
        """Reads the file. Raises OSError, or ValueError if the file is invalid or empty."""
        self._path = path
        self._own = {_digest(own): "http"} if own else {}
        super().__init__("tokens", path)
        self._names = _read(path)
        if not self._names:
            raise ValueError(f"{path} contains no token")

    def name(self, token: str) -> str | None:
        """The name of this token; None for a token that is not in the file.

        Found by its digest, so that the time it takes says nothing about other tokens.
        """
        digest = _digest(token)
        return self._names.get(digest) or (self._own.get(digest) if self._names else None)

    def _read_again(self) -> None:
        self._names = _read(self._path)
        level = logging.INFO if self._names else logging.WARNING
        _log.log(level, "reloaded %d tokens from %s", len(self._names), self._path)


def _read(path: Path) -> Mapping[bytes, str]:
    """Names by digest."""
    names: dict[bytes, str] = {}
    for number, line in enumerate(read_regular(path, _MOST_BYTES).decode().splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{path}, line {number}"
        token, *rest = words
        if not token.isascii() or not token.isprintable():
            raise ValueError(f"{where}: a token must be printable ASCII")
        if len(rest) > 1 or (rest and not _NAME.fullmatch(rest[0])):
            raise ValueError(f"{where}: after the token, at most a name of letters, digits and _ . @ - is allowed")
        if len(token) < _SHORT:
            _log.warning("%s: a token of %d characters can be guessed; use %d or more", where, len(token), _SHORT)
        digest = _digest(token)
        if digest in names:
            raise ValueError(f"{where}: this token is a duplicate")
        names[digest] = rest[0] if rest else f"token-{digest.hex()[:16]}"
    return names


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def principal(context: Context) -> str:
    """The name of the caller's token, or `certificate:` and the name of its certificate; "" without either.

    What one principal sent must never be visible to another.
    """
    if name := _token_name.get():
        return name
    identities = context.peer_identities() or ()
    return "certificate:" + ",".join(each.decode(errors="replace") for each in identities) if identities else ""


class Caller(NamedTuple):
    """The owner of a share of receive slots and permits."""

    name: str
    """The principal; the host if all callers are one principal."""
    connection: str


def caller_of(context: Context) -> Caller:
    peer = context.peer() or ""  # `ipv4:10.0.0.1:5000`, `ipv6:%5B::1%5D:5000` or `unix:`
    return Caller(principal(context) or peer_name(peer), peer)


class TokenAuth(grpc.aio.ServerInterceptor):
    """Refuses RPCs without a valid token before a message is read; health checks need none."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> RpcHandler | None:
        """Called by gRPC for each RPC, in the task that serves it."""
        if not details.method.startswith(_HEALTH):
            token = _bearer(details)
            name = self._tokens.name(token) if token else None
            if name is None:
                IS_REFUSED.set(True)
                return _refusal("the bearer token is not valid" if token else "a bearer token is required")
            _token_name.set(name)
        return await continuation(details)


def _bearer(details: grpc.HandlerCallDetails) -> str:
    """The caller's token; empty without one."""
    for key, value in details.invocation_metadata or ():
        if key == "authorization" and isinstance(value, str) and value[: len(_SCHEME)].lower() == _SCHEME:
            return value[len(_SCHEME) :].strip()
    return ""


def _refusal(reason: str) -> RpcHandler:
    """A handler that answers any kind of RPC without reading from it."""

    async def refuse(_: object, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

    return grpc.stream_stream_rpc_method_handler(refuse)
