"""The file of tokens: what it may hold, and what happens when it changes."""

import os
from pathlib import Path

import pytest

from certificates import Authority
from vitwire_flags.regular_files import WatchedFiles
from vitwire_server.rpc.credentials import Certificates, Tokens

ALICE, BOB, CAROL = "alice-0123456789abcdef", "bob-0123456789abcdef", "carol-0123456789abcdef"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


def test_a_token_a_line_with_or_without_a_name(file: Path) -> None:
    file.write_text(f"# comment\n\n{ALICE} alice@example\n  {BOB}\r\n#{CAROL}\n")
    tokens = Tokens(file)
    assert tokens.name(ALICE) == "alice@example"
    unnamed = tokens.name(BOB)
    assert unnamed is not None
    assert unnamed.startswith("token-")
    assert BOB not in unnamed
    for wrong in (CAROL, f"#{CAROL}", "", "alice@example", ALICE[:-1], ALICE + "x", ALICE.upper(), "\udcff"):
        assert tokens.name(wrong) is None, wrong


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("# nobody\n", "contains no token"),
        (f"{ALICE} two names\n", "line 1: after the token"),
        (f"{BOB} bob\n{ALICE} a/../b\n", "line 2: after the token"),
        (f"{ALICE} a\n{ALICE} b\n", "line 2: this token is a duplicate"),
        ("gr\u00fc\u00dfe-0123456789abcdef\n", "line 1: a token must be printable ASCII"),
    ],
)
def test_errors_name_the_line(file: Path, text: str, error: str) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=error) as raised:
        Tokens(file)
    assert ALICE not in str(raised.value), "a token is a secret"


def test_a_short_token_is_warned_about(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text("short\n")
    assert Tokens(file).name("short")
    assert "can be guessed" in caplog.text


def test_rotation(file: Path) -> None:
    file.write_text(f"{ALICE} alice\n")
    tokens = Tokens(file)
    file.write_text(f"{BOB} alice\n")
    tokens.refresh()
    assert tokens.name(ALICE) is None
    assert tokens.name(BOB) == "alice"
    file.write_text("")
    tokens.refresh()
    assert tokens.name(BOB) is None, "an empty file holds no valid token"


def test_what_cannot_be_read_leaves_the_tokens_as_they_were(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text(f"{ALICE} alice\n")
    tokens = Tokens(file)
    file.write_text(f"{BOB} one too many\n")
    tokens.refresh()
    assert tokens.name(ALICE) == "alice"
    assert "keeping the previous tokens" in caplog.text
    file.unlink()
    tokens.refresh()
    assert tokens.name(ALICE) == "alice"
    os.mkfifo(file)
    tokens.refresh()
    assert tokens.name(ALICE) == "alice"
    assert "not a regular file" in caplog.text
    file.unlink()
    file.write_text(f"{BOB}\n")
    tokens.refresh()
    assert tokens.name(ALICE) is None


class Counting(WatchedFiles):
    """Counts readings."""

    count = 0

    def _read_again(self) -> None:
        self.count += 1


def test_a_changed_file_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("a")
    watched = Counting("nothing", file)
    file.write_text("other")
    watched.refresh()
    watched.refresh()
    assert watched.count == 1
    os.utime(file, ns=(1, 1))
    watched.refresh()
    assert watched.count == 2


@pytest.mark.parametrize("flag", ["--tls-cert", "--tls-key", "--tls-client-ca"])
@pytest.mark.parametrize("content", [None, b"no PEM"])
def test_an_unusable_file_is_named_with_its_flag(tmp_path: Path, flag: str, content: bytes | None) -> None:
    authority, bad = Authority(tmp_path / "own"), tmp_path / "bad.pem"
    own = authority.issue()
    if content:
        bad.write_bytes(content)
    files = {"--tls-cert": own.cert, "--tls-key": own.key, "--tls-client-ca": authority.root} | {flag: bad}
    with pytest.raises(ValueError, match=rf"{flag} {bad}\b") as error:
        Certificates(*files.values())
    if content and flag == "--tls-cert":
        assert str(error.value).startswith(f"--tls-cert {bad}: no certificates in PEM")
