"""The fingerprint of preparation, by which callers keep apart what they stored."""

from hashlib import sha256
from importlib.metadata import version

import msgspec
import pytest

from prepared import MODELS
from vitwire_server.core.models import Preparation
from vitwire_server.process import file_decoding


def test_other_steps_change_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files were prepared in another way before transparency became white, with equal settings and libraries."""
    found = file_decoding._fingerprint(MODELS["patches"], Preparation(), clips=False)
    before = sha256(msgspec.json.encode(({"pillow": version("pillow")}, MODELS["patches"]), order="sorted"))
    assert found != before.hexdigest()
    monkeypatch.setattr(file_decoding, "_STEPS", file_decoding._STEPS + 1)
    assert file_decoding._fingerprint(MODELS["patches"], Preparation(), clips=False) != found
