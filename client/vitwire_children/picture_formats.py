"""The formats of images that Pillow reads of strangers' files, in decoders of the server and workers of the gateway.

Importing it loads their plugins: neither kind of process can import later.
"""

from PIL import (  # noqa: F401 - see above
    AvifImagePlugin,
    IcoImagePlugin,
    Image,
    Jpeg2KImagePlugin,
    MpoImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

Image.preinit()  # the other formats
AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # else one per core, whose stacks count as memory
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF", "TIFF", "ICO", "JPEG2000")
"""The only ones that are tried. Of animations, and files of several pictures, the first is used."""
