"""Formats of files, by their first bytes, as servers name those that they decode."""

CLIPS = ("mp4", "webm", "avi", "mpeg_ts")
HEAD_BYTES = 256
NOT_AN_IMAGE = "not a JPEG, PNG, WebP, GIF, BMP, AVIF, TIFF, ICO or JPEG 2000 image"
NOT_HEIC = "a HEIC image, which servers do not decode: convert it to JPEG, or send its pixels by the Python client"
_STARTS = (
    ("jpeg", b"\xff\xd8\xff"),
    ("png", b"\x89PNG\r\n\x1a\n"),
    ("gif", b"GIF8"),
    ("bmp", b"BM"),
    ("webm", b"\x1a\x45\xdf\xa3"),
    ("ico", b"\0\0\1\0"),
    ("jpeg2000", b"\0\0\0\x0cjP  \r\n\x87\n"),
    ("jpeg2000", b"\xff\x4f\xff\x51"),
    *(("tiff", mark) for mark in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
)
_IN_RIFF = {b"WEBP": "webp", b"AVI ": "avi"}
_AVIF = (b"avif", b"avis")
_HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")
"""Brands of files that begin as those of MP4; the last two are used by AVIF as well, with its brands beside them."""
_TS = (0, 188), (4, 196)
"""Where packets of transport streams begin, and of those with times before each."""


def kind_of(head: bytes | bytearray | memoryview) -> str | None:
    """The format as `Model.encodings` has it, or heic, by at least the first `HEAD_BYTES` bytes; None for another."""
    start = bytes(head[:HEAD_BYTES])
    brand = start[8:12]
    if start[:4] == b"RIFF":
        return _IN_RIFF.get(brand)
    if start[4:8] == b"ftyp":
        if brand in _AVIF or (brand in _HEIC and any(each in start[16 : start[3]] for each in _AVIF)):
            return "avif"
        return "heic" if brand in _HEIC else "mp4"
    if found := next((name for name, mark in _STARTS if start.startswith(mark)), None):
        return found
    return "mpeg_ts" if any(start[one : one + 1] == start[two : two + 1] == b"G" for one, two in _TS) else None
