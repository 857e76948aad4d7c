"""Files of images and clips, good, odd and hostile."""

import io
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from skimage import data

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

Frame = NDArray[np.uint8]
_ICON = b"\0\0\1\0\1" + bytes(13) + b"\x16\0\0\0"
_PNG = b"\x89PNG\r\n\x1a\n"


_photograph: Callable[[], Frame] = data.astronaut


def photograph(height: int = 300, width: int = 400) -> Image.Image:
    """A real photograph of this size."""
    return Image.fromarray(_photograph()).resize((width, height), Image.Resampling.BICUBIC)


def saved(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """The image as a file."""
    with io.BytesIO() as file:
        image.save(file, kind, **options)
        return file.getvalue()


def turned(kind: str, orientation: int = 6) -> bytes:
    """A photograph with an orientation in its EXIF data."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(photograph(), kind, exif=exif)


def late_orientation() -> bytes:
    """A PNG whose EXIF data come after its pixels, as the format allows."""
    plain, exif = saved(photograph(), "PNG"), Image.Exif()
    exif[0x0112] = 6
    end = plain.rindex(b"IEND") - 4
    return plain[:end] + chunk(b"eXIf", exif.tobytes()[6:]) + plain[end:]


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few kilobytes that declares any size."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return _PNG + header + chunk(b"IDAT", zlib.compress(bytes(1 << 20))) + chunk(b"IEND", b"")


def jpeg_of_size(width: int, height: int) -> bytes:
    """A JPEG whose header declares any size."""
    plain = saved(photograph(64, 64))
    at = plain.index(b"\xff\xc0") + 5
    return plain[:at] + struct.pack(">HH", height, width) + plain[at + 4 :]


def many_scans(side: int = 4000, count: int = 4000) -> bytes:
    """A progressive JPEG that repeats a scan: small, but each repetition costs a pass over all pixels."""
    plain = saved(Image.new("RGB", (side, side)), progressive=True)
    start = plain.rindex(b"\xff\xda")
    scan = plain[start:-2]
    return plain[:start] + scan * count + plain[-2:]


def huge_metadata() -> bytes:
    """A PNG with text that takes a GiB when it is unpacked."""
    plain = saved(photograph(), "PNG")
    text = b"comment\0\0" + zlib.compress(bytes(1 << 24), 9) * 1
    return plain[:33] + chunk(b"zTXt", text) * 64 + plain[33:]


def patched(kind: str, box: bytes, side: int) -> bytes:
    """A file whose header says to be of another size."""
    head, found, rest = saved(photograph(), kind).partition(box)
    return head + found + struct.pack(">II", side, side) + rest[8:]


def animated(kind: str) -> bytes:
    """Three frames in one file."""
    frames = [photograph().rotate(angle) for angle in (0, 30, 60)]
    return saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)


def palette_with_transparency() -> bytes:
    """A PNG whose palette has an alpha value per colour."""
    image = photograph().convert("P", palette=Image.Palette.ADAPTIVE)
    return saved(image, "PNG", transparency=bytes(range(256)))


def sixteen_bits() -> bytes:
    """A PNG with 16 bits per pixel."""
    return saved(Image.fromarray((np.asarray(photograph().convert("L")).astype(np.uint16) << 8) + 7), "PNG")


ODD: dict[str, Callable[[], bytes]] = {
    "cmyk": lambda: saved(photograph().convert("CMYK")),
    "grey": lambda: saved(photograph().convert("L")),
    "progressive": lambda: saved(photograph(), progressive=True),
    "sixteen bits": sixteen_bits,
    "one bit": lambda: saved(photograph().convert("1"), "PNG"),
    "palette": palette_with_transparency,
    "alpha": lambda: saved(photograph().convert("RGBA"), "PNG"),
    "alpha of webp": lambda: saved(photograph().convert("RGBA"), "WEBP"),
    "turned jpeg": lambda: turned("JPEG"),
    "turned png": lambda: turned("PNG"),
    "turned webp": lambda: turned("WEBP"),
    "late orientation": late_orientation,
    "one pixel": lambda: saved(photograph(1, 1), "PNG"),
    "trailing bytes": lambda: saved(photograph()) + b"PK\x03\x04" + bytes(1000),
    "turned avif": lambda: turned("AVIF"),
}
"""Valid images, which are prepared as the client prepares them."""
FURTHER: dict[str, Callable[[], bytes]] = {
    "animated png": lambda: animated("PNG"),
    "animated webp": lambda: animated("WEBP"),
    "animated avif": lambda: animated("AVIF"),
    "tiff of pages": lambda: saved(photograph(), "TIFF", save_all=True, append_images=[photograph(50, 70)]),
    "turned tiff": lambda: turned("TIFF"),
    "grey tiff of 16 bits": lambda: saved(Image.fromarray(np.asarray(photograph())[..., 0] * np.uint16(9)), "TIFF"),
    "icon of bitmaps": lambda: saved(photograph().convert("RGBA"), "ICO", bitmap_format="bmp"),
    "jpeg 2000": lambda: saved(photograph().convert("LA"), "JPEG2000"),
    "its bare code": lambda: saved(photograph(), "JPEG2000", no_jp2=True, tile_size=(64, 64)),
}
"""Animations, and formats of which few are sent."""


def tiff(width: int, height: int, strips: int = 1) -> bytes:
    """A grey TIFF without pixels, of so many strips."""
    tags = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 273: 150, 277: 1, 278: 1, 279: 150}
    entries = [struct.pack("<HHII", tag, 4, strips if value == 150 else 1, value) for tag, value in tags.items()]
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join(entries) + bytes(32 + 4 * strips)


HOSTILE: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "nonsense": (lambda: b"nonsense" * 100, "unsupported", "is not a JPEG, PNG, WebP, GIF, BMP, AVIF"),
    "heic": (lambda: b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(99), "unsupported", "is a HEIC image"),
    "huge tiff": (lambda: tiff(60_000, 60_000), "too_large", "pixels"),
    "icon of a large picture": (lambda: _ICON + saved(Image.new("L", (9000, 9000)), "PNG"), "too_large", "9000x9000"),
    "huge jpeg 2000": (lambda: patched("JPEG2000", b"ihdr", 60_000), "too_large", "pixels"),
    "large avif": (lambda: patched("AVIF", b"ispe\0\0\0\0", 9000), "too_large", "9000x9000 exceeds the limit"),
    "postscript": (lambda: saved(photograph(), "EPS"), "unsupported", "is not a JPEG"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
            "unsupported", "is not a JPEG"),
    "zip": (lambda: b"PK\x03\x04" + saved(photograph()), "unsupported", "is not a JPEG"),
    "truncated jpeg": (lambda: saved(photograph())[:3000], "malformed", "cannot be decoded: image file is truncated ("),
    "truncated png": (lambda: saved(photograph(), "PNG")[:3000], "malformed", "truncated"),
    "truncated webp": (lambda: saved(photograph(), "WEBP")[:3000], "", ""),
    "header alone": (lambda: saved(photograph())[:20], "", ""),
    "bad checksum": (lambda: saved(photograph(), "PNG").replace(b"IDAT", b"IDAx", 1), "", ""),
    "bomb": (lambda: bomb(60_000, 60_000), "too_large", "pixels"),
    "bomb within pillow's limit": (lambda: bomb(9_000, 9_000), "too_large", "9000x9000 exceeds the limit"),
    "huge jpeg": (lambda: jpeg_of_size(65_000, 65_000), "too_large", "pixels"),
    "elongated": (lambda: saved(Image.new("RGB", (8000, 2)), "PNG"), "malformed", "too elongated"),
    "huge metadata": (huge_metadata, "malformed", ""),
    "less than its header says": (lambda: bomb(2_000, 2_000), "malformed", "truncated"),
}  # fmt: skip
"""Invalid images: how to make each, and the fault and a part of the reason, where these are certain."""


def clip(
    frames: Sequence[Frame],
    fps: float = 10.0,
    kind: str = "mp4",
    codec: str = "libx264",
    options: Mapping[str, str] | None = None,
    matrix: Sequence[int] | None = None,
    times: Sequence[int] = (),
) -> bytes:
    """The frames as a file; `options` are the codec's, `matrix` is how players show it, `times` when, in ms."""
    with io.BytesIO() as file:
        with av.open(file, "w", format=kind) as container:
            rate = Fraction(fps).limit_denominator(1001)
            stream = cast("VideoStream", container.add_stream(codec, rate=rate))
            stream.height, stream.width = frames[0].shape[:2]
            stream.pix_fmt = "yuv420p"
            stream.options = {"crf": "10", **(options or {})}
            stream.set_display_matrix(matrix)
            unit = stream.codec_context.time_base = Fraction(1, 1000) if times else 1 / rate
            for time, frame in zip(times or range(len(frames)), frames, strict=True):
                shown = av.VideoFrame.from_ndarray(frame, format="rgb24")
                shown.pts, shown.time_base = time, unit
                container.mux(stream.encode(shown))
            container.mux(stream.encode())
        return file.getvalue()


def numbered(count: int) -> list[Frame]:
    """Frames that differ much: the bits of its number, up to 255, are the columns of a frame."""
    bits = np.unpackbits(np.arange(count, dtype=np.uint8)[:, None], axis=1) * np.uint8(255)
    return [np.ascontiguousarray(np.broadcast_to(row[:, None], (96, 128, 3))) for row in np.repeat(bits, 16, axis=1)]


def numbered_clips() -> dict[str, bytes]:
    """Rates, counts, orders of frames and edit lists (late, hidden) that easily lead to other frames or times."""
    uneven = [60 * each + 20 * (each % 3) + 500 * (each // 9) for each in range(41)]
    return {
        **{f"{rate} a second": clip(numbered(round(2 * rate) + 1), rate) for rate in (1, 23.976, 29.97, 30, 60)},
        **{f"{count} in all": clip(numbered(count)) for count in (1, 2, 3, 5)},
        "open groups": clip(numbered(41), options={"g": "10", "x264-params": "open-gop=1:b-adapt=0:b-pyramid=normal"}),
        "uneven": clip(numbered(41), 25.0, codec="libx265", times=uneven),
        "uneven VP8": clip(numbered(41), 25.0, "webm", "libvpx", times=uneven),
        "late": clip(numbered(31), times=range(700, 3800, 100)),
        "12 are hidden": clip(numbered(41), options={"g": "5"}, times=range(-1200, 2900, 100)),
        "one is hidden": clip(numbered(31), times=range(-100, 3000, 100)),
    }


def cut(file: bytes, packets: int, kind: str = "mp4") -> bytes:
    """A file without its first packets, as recorders and careless tools make them."""
    with io.BytesIO() as copy:
        with _read(file) as source, av.open(copy, "w", format=kind) as container:
            stream = container.add_stream_from_template(source.streams.video[0])
            for number, packet in enumerate(source.demux(video=0)):
                if number >= packets and packet.dts is not None:
                    packet.stream = stream
                    container.mux(packet)
        return copy.getvalue()


def coded_otherwise(file: bytes, other: bytes) -> bytes:
    """An MP4 file whose frames from the second on say that they have the settings of another file."""

    def box(data: bytes, name: bytes) -> tuple[int, int]:
        start = data.rindex(name) - 4
        return start, start + int.from_bytes(data[start : start + 4], "big")

    def changed(data: bytes, name: bytes, content: bytes) -> bytes:
        (start, end), made = box(data, name), bytearray(data)
        for each in (b"moov", b"trak", b"mdia", b"minf", b"stbl", name):
            at, behind = box(data, each)
            made[at : at + 4] = struct.pack(">I", behind - at + len(content) - (end - start - 8))
        return bytes(made[: start + 8] + content + made[end:])

    with _read(file) as source:
        places = [packet.pos for packet in source.demux(video=0) if packet.size]
    entries = file[slice(*box(file, b"avc1"))] + other[slice(*box(other, b"avc1"))]
    made = changed(file, b"stsd", struct.pack(">II", 0, 2) + entries)
    made = changed(made, b"stsc", struct.pack(">8I", 0, 2, 1, 1, 1, 2, 1, 2))
    return changed(made, b"stco", struct.pack(f">{2 + len(places)}I", 0, len(places), *places))


def never_shown(count: int, padding: int) -> bytes:
    """An MP4 file of so many frames that need one that is missing, so that none is shown, and of bytes of padding."""
    with io.BytesIO() as copy:
        whole = clip([np.zeros((1080, 1920, 3), np.uint8)] * 3)
        with _read(whole) as source, av.open(copy, "w", format="mp4") as container:
            stream = container.add_stream_from_template(source.streams.video[0])
            later = next(packet for packet in source.demux(video=0) if not packet.is_keyframe)
            for number in range(count):
                packet = av.Packet(bytes(later))
                packet.stream, packet.time_base = stream, Fraction(1, 10)
                packet.pts = packet.dts = number
                container.mux(packet)
        return copy.getvalue() + struct.pack(">I4s", padding, b"free") + bytes(padding - 8)


def many_chunks(count: int) -> bytes:
    """A PNG with so many chunks of metadata."""
    plain = saved(photograph(), "PNG")
    return plain[:33] + chunk(b"noTe", b"") * count + plain[33:]


def sound() -> bytes:
    """An MP4 file without video."""
    with io.BytesIO() as file:
        with av.open(file, "w", format="mp4") as container:
            stream = container.add_stream("aac", rate=16_000)
            samples = np.zeros((1, 16_000), np.float32)
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            frame.sample_rate = 16_000
            container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return file.getvalue()


def moving(count: int, height: int = 96, width: int = 128) -> list[Frame]:
    """Frames of a photograph that moves."""
    whole = np.asarray(photograph(height, width + count))
    return [np.ascontiguousarray(whole[:, index : index + width]) for index in range(count)]


def _read(file: bytes) -> "InputContainer":
    return cast("InputContainer", av.open(io.BytesIO(file)))


def frames_of(file: bytes, indices: Sequence[int]) -> list[Frame]:
    """Frames as the reference reads them: transformers' `read_video_pyav`."""
    with _read(file) as container:
        wanted = set(indices)
        return [
            frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False)
            for index, frame in enumerate(container.decode(video=0))
            if index in wanted
        ]
