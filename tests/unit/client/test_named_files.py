"""Files of certificates that flags name."""

import os
from pathlib import Path

import grpc
import pytest

from certificates import Authority
from vitwire.shared.named_files import tls_of, trusting


def test_comments_may_be_in_any_encoding(tmp_path: Path) -> None:
    """As in the file of the package certifi."""
    file = tmp_path / "ca.pem"
    file.write_bytes("# Főtanúsítvány\n".encode() + Authority(tmp_path / "own").root.read_bytes())
    assert len(trusting("--ca", file).get_ca_certs()) == 1
    assert tls_of(tls=False, ca=file, cert=None, key=None) == file


def test_an_empty_file_does_not_mean_the_systems_certificates(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(ValueError, match=f"--ca {empty}: no certificates in PEM"):
        tls_of(tls=True, ca=empty, cert=None, key=None)


def test_a_file_may_be_a_pipe_of_the_shell(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, Authority(tmp_path / "own").root.read_bytes())
    os.close(writing)
    try:
        found = tls_of(tls=False, ca=Path(f"/dev/fd/{reading}"), cert=None, key=None)
    finally:
        os.close(reading)
    assert isinstance(found, grpc.ChannelCredentials)
