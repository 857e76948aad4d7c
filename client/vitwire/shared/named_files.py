"""Files that flags name, with errors that name both."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc


@contextmanager
def naming(flag: str, file: Path) -> Iterator[None]:
    """Errors in the block become ValueError with the flag and the file."""
    try:
        yield
    except (ssl.SSLError, UnicodeError) as error:
        what = "not the certificate's unencrypted key in PEM" if flag.endswith("key") else "no certificates in PEM"
        raise ValueError(f"{flag} {file}: {what}: {error}") from error
    except OSError as error:
        raise ValueError(f"{flag} {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{flag} {file}: {error}") from error


def trusting(flag: str, file: Path) -> ssl.SSLContext:
    """TLS that trusts the certificates in the file. Raises ValueError."""
    with naming(flag, file):
        return ssl.create_default_context(cadata=file.read_text("ascii"))


def tls_of(*, tls: bool, ca: Path | None, cert: Path | None, key: Path | None) -> bool | Path | grpc.ChannelCredentials:
    """A client's `tls`, from the flags --tls, --ca, --cert and --key. Raises ValueError."""
    if ca:
        trusting("--ca", ca)
    if not cert or not key:
        if cert or key:
            raise ValueError("--cert and --key must be set together")
        return ca or tls
    for flag, file in (("--cert", cert), ("--key", key)):
        with naming(flag, file):
            file.read_bytes()
    with naming(f"--cert {cert} --key", key):
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password="")
    return grpc.ssl_channel_credentials(ca.read_bytes() if ca else None, key.read_bytes(), cert.read_bytes())
