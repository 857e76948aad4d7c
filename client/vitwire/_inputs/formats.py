"""Files of images and clips: their format, by their first bytes."""

CLIPS = ("mp4", "webm")
HEAD_BYTES = 12
_STARTS = (
    ("jpeg", b"\xff\xd8\xff"),
    ("png", b"\x89PNG\r\n\x1a\n"),
    ("gif", b"GIF8"),
    ("bmp", b"BM"),
    ("webm", b"\x1a\x45\xdf\xa3"),
)
_IMAGES_IN_MP4 = (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")
"""Brands of AVIF and HEIC, whose files begin as those of MP4."""


def encoding_of(head: bytes | bytearray | memoryview) -> str | None:
    """The format as `Model.encodings` names it, by at least the first `HEAD_BYTES` bytes; None for another one."""
    start = bytes(head[:HEAD_BYTES])
    if start[:4] == b"RIFF" and start[8:] == b"WEBP":
        return "webp"
    if start[4:8] == b"ftyp":
        return None if start[8:] in _IMAGES_IN_MP4 else "mp4"
    return next((name for name, mark in _STARTS if start.startswith(mark)), None)
