"""Errors cross processes as they are."""

import pickle

import pytest

from vitwire_server.core import errors
from vitwire_server.core.errors import EncoderError, InvalidRequest, InvalidTensors, Overloaded, Violation

SPECIAL: list[EncoderError] = [
    InvalidRequest([Violation("items[0].grid.h", "must be even"), Violation("items", "too many")]),
    InvalidTensors({"pixels": "NaN", "crops": "infinity"}),
    Overloaded("full", reason="bytes", retry_seconds=0.5),
]
EVERY = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, EncoderError)}
PLAIN = sorted(EVERY - set(map(type, SPECIAL)), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("error", [*SPECIAL, *(kind("why") for kind in PLAIN)], ids=lambda error: type(error).__name__)
def test_every_error_survives_pickling(error: EncoderError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))
    if isinstance(copy, InvalidTensors):
        assert copy.of_item(3).violations[0] == Violation("items[3].pixels.data", "NaN")
