"""What the fake service makes of pictures and files: the grid that Qwen's processor would choose."""

import io
import math
import zlib

from PIL import Image

from vitwire.v1 import encoder_pb2 as pb

SIDE, PATCH = 8, 4
"""Pixels of a token's side, and of a patch's."""
LEAST, MOST = 16 * 16, 64 * 64
"""Pixels of a prepared image."""
_DECODED = 1 << 20
"""Pixels of the largest file that is decoded."""
ENCODINGS = (pb.ENCODING_JPEG, pb.ENCODING_PNG, pb.ENCODING_WEBP, pb.ENCODING_GIF, pb.ENCODING_BMP)


def describe(message: pb.GetModelResponse) -> None:
    """Say in a model's description that the service prepares images and clips, and decodes files of images."""
    message.prepared.extend([pb.MODALITY_IMAGE, pb.MODALITY_VIDEO])
    message.rows_by_grid.extend([pb.MODALITY_IMAGE, pb.MODALITY_VIDEO])
    message.preparation_fingerprint = "cd"
    message.encodings.extend(ENCODINGS)
    message.limits.encoded_bytes = 1 << 20
    message.limits.encoded_pixels = 1 << 22


def prepared(item: pb.Item) -> tuple[pb.Grid, float] | None:
    """The grid of a file or picture, and a value that follows from its content; None for an item that has a grid.

    Raises OSError for a file that cannot be decoded; large ones are not.
    """
    if item.encoded:
        with Image.open(io.BytesIO(item.encoded)) as opened:
            *frames, height, width = opened.height, opened.width
            if height * width <= _DECODED:
                opened.load()
        value = zlib.crc32(item.encoded) % 128
    elif item.HasField("pixels") and not item.HasField("grid"):
        assert item.pixels.data_type == pb.DATA_TYPE_UINT8
        *frames, height, width, _ = item.pixels.shape
        value = item.pixels.data[0]
    else:
        return None
    rows, columns = (side // PATCH for side in resized(height, width))
    return pb.Grid(t=-(-frames[0] // 2) if frames else 1, h=rows, w=columns), float(value)


def resized(height: int, width: int) -> tuple[int, int]:
    """The size in whole tokens, near that of the picture and within the bounds of its area."""
    sides = (max(SIDE, round(height / SIDE) * SIDE), max(SIDE, round(width / SIDE) * SIDE))
    if math.prod(sides) > MOST:
        scale = math.sqrt(MOST / (height * width))
        return math.floor(height * scale / SIDE) * SIDE, math.floor(width * scale / SIDE) * SIDE
    if math.prod(sides) < LEAST:
        scale = math.sqrt(LEAST / (height * width))
        return math.ceil(height * scale / SIDE) * SIDE, math.ceil(width * scale / SIDE) * SIDE
    return sides
