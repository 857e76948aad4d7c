"""Images, as files, as `data:` URLs and on a web server."""

import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

SIZES = [(64, 64), (96, 64), (64, 128), (200, 120)]


def picture(width: int, height: int, kind: str = "JPEG", seed: int = 0) -> bytes:
    """The file of an image."""
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(file, kind)
    return file.getvalue()


def data_url(content: bytes, kind: str = "image/jpeg") -> str:
    return f"data:{kind};base64,{b64encode(content).decode()}"


def video(file: bytes) -> dict[str, Any]:
    """The part of a message with a clip."""
    return {"type": "video_url", "video_url": {"url": data_url(file, "video/mp4")}}


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    image.save(file := BytesIO(), kind, **options)
    return file.getvalue()


def awkward() -> dict[str, bytes]:
    """Files whose size, or whether it is honoured, is easily got wrong."""
    colours = Image.open(BytesIO(picture(130, 70)))
    turned = Image.Exif()
    turned[0x0112] = 6
    return {
        "turned": saved(colours, "JPEG", exif=turned),
        "turned PNG": saved(colours, "PNG", exif=turned),
        "transparent": saved(colours.convert("RGBA"), "PNG"),
        "palette": saved(colours.convert("P"), "GIF"),
        "grey": saved(colours.convert("L"), "JPEG"),
        "CMYK": saved(colours.convert("CMYK"), "JPEG"),
        "WebP": saved(colours, "WEBP"),
        "BMP": saved(colours, "BMP"),
        "tiny": saved(colours.resize((1, 1)), "PNG"),
        "long": saved(colours.resize((400, 20)), "JPEG"),
    }


class Site(BaseHTTPRequestHandler):
    """A web server whose paths are what it does."""

    def do_GET(self) -> None:
        content = {"/photo": picture(*SIZES[0]), "/large": bytes(3 << 20), "/empty": b""}.get(self.path)
        if self.path == "/stuck":
            self.server.released.wait(30)
        if self.path == "/to-a-file":
            self.send_response(302)
            self.send_header("location", "file:///etc/hostname")
        else:
            self.send_response(404 if content is None else 200)
        self.end_headers()
        with suppress(ConnectionError):  # of a caller that has left
            self.wfile.write(content or b"")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def image_site() -> Iterator[str]:
    """The address of a web server on loopback, which runs in the block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        server.released = threading.Event()
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.released.set()
            server.shutdown()
