"""Files that flags name, with errors that name both."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc


class UnusableFile(ValueError):
    """A file that cannot be used; the message begins with the flag and the file."""


@contextmanager
def naming(flag: str, file: Path) -> Iterator[None]:
    """Errors in the block become UnusableFile."""
    try:
        yield
    except ssl.SSLError as error:
        what = "not the certificate's unencrypted key in PEM" if flag.endswith("key") else "no certificates in PEM"
        raise UnusableFile(f"{flag} {file}: {what}: {error}") from error
    except OSError as error:
        raise UnusableFile(f"{flag} {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise UnusableFile(f"{flag} {file}: {error}") from error


def trusting(flag: str, file: Path) -> ssl.SSLContext:
    """TLS that trusts the certificates in the file. Raises ValueError."""
    return _trusting(flag, file, _content(flag, file))


def tls_of(*, tls: bool, ca: Path | None, cert: Path | None, key: Path | None) -> bool | Path | grpc.ChannelCredentials:
    """A client's `tls`, from the flags --tls, --ca, --cert and --key. Raises ValueError.

    Each file is read once, as it may be a pipe of the shell; such a certificate is not compared with its key.
    """
    roots = _content("--ca", ca) if ca else None
    if ca and roots is not None:
        _trusting("--ca", ca, roots)
    if not cert or not key:
        if cert or key:
            raise ValueError("--cert and --key must be set together")
        return ca if ca and ca.is_file() else grpc.ssl_channel_credentials(roots) if roots else tls
    chain, private = _content("--cert", cert), _content("--key", key)
    if cert.is_file() and key.is_file():
        with naming(f"--cert {cert} --key", key):
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password="")
    return grpc.ssl_channel_credentials(roots, private, chain)


def _content(flag: str, file: Path) -> bytes:
    with naming(flag, file):
        return file.read_bytes()


def _trusting(flag: str, file: Path, content: bytes) -> ssl.SSLContext:
    with naming(flag, file):  # comments between certificates may be in any encoding
        # Nothing at all would mean the system's certificates.
        return ssl.create_default_context(cadata=content.decode("ascii", "ignore") or " ")
