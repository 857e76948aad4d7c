"""`data:` URIs of files in base64, and what is meant by texts that are none."""

import binascii
import re

NO_HEAD = "is base64 without its head: write data:image/jpeg;base64, or its other media type before it"
_PIECE = 1 << 20
_SHOWN = 80
_HEAD = re.compile(r'data:(?:"[^"]*"|[^"])*?;base64,', re.IGNORECASE)
"""Up to the data. Parameters may have commas, as of codecs, and more of them in quotes."""
_LONGEST_HEAD = 1024
_BARE = re.compile(r"[A-Za-z0-9+/\r\n]{64,}={0,2}\s*")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_SEND = "no files of this machine are read: send the content as data:...;base64,..."
_WRONG = (
    (re.compile(r"%[0-9A-Fa-f]{2}"), "it has percent escapes: decode them, such as %2B to +"),
    (re.compile(r"\s"), "it has line breaks or spaces: remove them (base64 -w0 writes none)"),
    (re.compile(r"[-_]"), "it has - or _, of the alphabet for URLs: write + and /"),
    (re.compile(r"[^!-~]"), "it has characters beyond ASCII"),
)


def payload_of(uri: str) -> str:
    """The base64 of a `data:` URI. Raises ValueError."""
    if head := _HEAD.match(uri[:_LONGEST_HEAD]):
        return uri[head.end() :]
    raise ValueError(f"{uri[:_SHOWN]!r}: expected data:...;base64,...")


def decoded(base64: str) -> bytes:
    """The bytes, decoded in pieces, as each keeps all threads waiting. Raises ValueError that says what is wrong."""
    content = bytearray()
    try:
        view = memoryview(base64.encode("ascii"))
        for start in range(0, len(view), _PIECE):
            if len(content) != start // 4 * 3:
                raise binascii.Error("padding in the middle")
            content += binascii.a2b_base64(view[start : start + _PIECE], strict_mode=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        reason = next((text for pattern, text in _WRONG if pattern.search(base64)), None)
        raise ValueError(f"invalid base64: {reason or error}") from error
    return bytes(content)


def is_bare(text: str) -> bool:
    """Whether a text looks like base64 that should be in a `data:` URI."""
    return _BARE.fullmatch(text[:_LONGEST_HEAD]) is not None


def mistaken(text: str) -> str | None:
    """What a text is that should be a URL; None if it has the form of one."""
    if is_bare(text):
        return NO_HEAD
    if text[:5].lower() == "file:":
        return f"is a file: URL, and {_SEND}"
    return None if _SCHEME.match(text) else f"is a path or a name, and {_SEND}"
