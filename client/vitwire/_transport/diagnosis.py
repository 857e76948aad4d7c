"""Explains in a sentence why a connection fails: gRPC describes only the symptoms of a wrong port or wrong TLS."""

import re
import socket
import ssl
from dataclasses import dataclass

from vitwire.errors import Unavailable, VitwireError

_SECONDS = 1.0
"""For each step of a probe, which is made once gRPC could not connect to any address."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The first bytes that a gRPC client sends: the preface of HTTP/2 and empty SETTINGS."""
_CERTIFICATE_REQUEST = 13
"""Type of the TLS message in which a server asks for a client certificate (RFC 8446, RFC 5246)."""
_ADDRESS = re.compile(r"(?:ipv4|ipv6):(\[.*?\]|[^\s:]+):(\d+)")
_NO_CONNECTION = ("failed to connect to all addresses", "connections to all backends failing")
_CLOSED = ("Socket closed", "Connection reset", "Broken pipe")

_WRONG_NAME = "the server's certificate does not cover the target's name"
_NO_CERTIFICATE = (
    "the server accepts only clients with a certificate from a CA that it trusts: "
    "set tls=grpc.ssl_channel_credentials(root, key, certificate) (--cert and --key)"
)
_SYMPTOMS = {
    "WRONG_VERSION_NUMBER": "the server does not speak TLS: leave out tls= (--tls, --ca), or check the port",
    "Expected SETTINGS frame": "the server does not speak gRPC: check the port, which may be the metrics port",
    "http1.x server": "the server does not speak gRPC: check the port, which may be the metrics port",
    "missing selected ALPN": "the server speaks TLS but not gRPC: check the port",
    "CERTIFICATE_VERIFY_FAILED": (
        "the server's certificate is not trusted ({reason}): set tls= (--ca) to a file with its CA's certificate"
    ),
    "Hostname Verification Check failed": _WRONG_NAME,
    "is not in peer certificate": _WRONG_NAME,
}
"""Parts of the descriptions by gRPC 1.71 to 1.85, and what they mean."""


@dataclass(frozen=True, slots=True)
class Security:
    """TLS settings of a client."""

    uses_tls: bool
    may_have_certificate: bool


def diagnosed(failure: VitwireError, security: Security) -> VitwireError:
    """The failure, or what it means if it is gRPC's that no address can be connected to. Blocks for a probe."""
    text = str(failure)
    if not isinstance(failure, Unavailable) or not any(start in text for start in _NO_CONNECTION):
        return failure
    found = _ADDRESS.search(text)
    where = f"{found[1]}:{found[2]}: " if found else ""
    for symptom, meaning in _SYMPTOMS.items():
        if symptom in text:
            return _meaning(failure, where + meaning.format(reason=_reason(text)))
    if found is None or not any(closed in text for closed in _CLOSED):
        return failure
    speaks_tls, wants_certificate = _probed(found[1].strip("[]"), int(found[2]))
    if speaks_tls and not security.uses_tls:
        return _meaning(
            failure, f"{where}the server speaks TLS: set tls=True or a file of root certificates (--tls or --ca)"
        )
    if wants_certificate and security.uses_tls:
        return _meaning(failure, where + _NO_CERTIFICATE, is_permanent=not security.may_have_certificate)
    return failure


def unheard(failure: VitwireError, target: str) -> VitwireError:
    """The failure, or that nothing listens at the target, as the user named it, if gRPC was refused a connection."""
    text = str(failure)
    if isinstance(failure, Unavailable) and text.startswith(_NO_CONNECTION) and "Connection refused" in text:
        return _meaning(failure, f"nothing listens at {target} (connection refused)", is_permanent=False)
    return failure


def _probed(host: str, port: int) -> tuple[bool, bool]:
    """Two facts about a server: it speaks TLS; it asked for a certificate and closed a connection without one."""
    speaks_tls = asked = False

    def saw(*message: object) -> None:
        nonlocal asked
        asked |= message[4] == _CERTIFICATE_REQUEST

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    context.set_alpn_protocols(["h2"])
    # For debugging, in CPython 3.8 and later; if it is not called, nothing is concluded.
    context._msg_callback = saw  # type: ignore[attr-defined]  # noqa: SLF001
    try:
        with socket.create_connection((host, port), _SECONDS) as plain, context.wrap_socket(plain) as connection:
            speaks_tls = True
            connection.sendall(_PREFACE)
            return True, asked and not connection.recv(1)
    except TimeoutError:
        return speaks_tls, False
    except OSError:  # of TLS too
        return speaks_tls or asked, asked


def _meaning(failure: Unavailable, text: str, *, is_permanent: bool = True) -> Unavailable:
    meaning = Unavailable(text, code=failure.code, request_id=failure.request_id)
    meaning.is_permanent = is_permanent
    meaning.add_note(f"gRPC: {failure}")
    return meaning


def _reason(text: str) -> str:
    """The reason, in OpenSSL's words, for which a certificate was not verified."""
    found = re.search(r"CERTIFICATE_VERIFY_FAILED: (.+?)(?:: OK|$)", text)
    return found[1] if found else "its CA is unknown"
