"""Sizes in bytes, as users write them."""

import re
from decimal import Decimal

_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def size_of(text: str) -> int:
    """Bytes of `4096`, `500MB` or `1.5 GiB`. Raises ValueError."""
    found = _FORM.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not a size; write a number of bytes, or a size such as 500MB or 4GiB")
    number, unit, binary = found.groups()
    return int(Decimal(number) * (1024 if binary else 1000) ** _POWERS[(unit or "").lower()])


def shown(nbytes: int) -> str:
    """A size for readers; the number of bytes is exact if no decimal place is shown."""
    for unit, size in _UNITS:
        if nbytes >= size:
            return f"{nbytes // size} {unit}" if nbytes % size == 0 else f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
