"""Tables of passes followed by torch on the host, in place of the kernel."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from vitwire_server.preparing.device.tables import Axis, Field
from vitwire_server.preparing.rules.filters import PRECISION
from vitwire_server.preparing.rules.patches import CHANNELS

Row = dict[Field, int]


def follow(table: Tensor, largest: tuple[int, int], dtype: torch.dtype, affine: Tensor) -> None:  # noqa: ARG001
    """See `kernels.follow`; the table is on the host, as is all that it has addresses of."""
    for numbers in table.tolist():
        row: Row = dict(zip(Field, numbers, strict=True))
        canvas = _canvas(row)
        if dtype is not torch.uint8:
            scale, offset = affine[row[Field.AFFINE]]
            canvas = torch.mul(canvas, scale).add_(offset)
        _write(row, canvas, dtype)


def _canvas(row: Row) -> Tensor:
    """`(down, across, 3)` uint8: the result of a pass, or a part of it, on its background."""
    result, background = _result(row), row[Field.BACKGROUND]
    colour = torch.tensor([background >> 8 * channel & 255 for channel in range(CHANNELS)], dtype=torch.uint8)
    canvas = colour.expand(row[Field.DOWN], row[Field.ACROSS], CHANNELS).clone()
    top, left = row[Field.TOP], row[Field.LEFT]
    shown = result[max(-top, 0) :, max(-left, 0) :]
    room = canvas[max(top, 0) :, max(left, 0) :][: len(shown), : shown.shape[1]]
    room.copy_(shown[: len(room), : room.shape[1]])
    return canvas


def _result(row: Row) -> Tensor:
    """`(height, width, 3)` uint8."""
    axis = Axis(row[Field.AXIS])
    shape = [row[Field.HEIGHT], row[Field.WIDTH], CHANNELS]
    if axis is not Axis.NONE:
        shape[axis] = row[Field.LAST] + 1
    strides = [row[Field.SOURCE_DOWN], row[Field.SOURCE_RIGHT], row[Field.SOURCE_CHANNEL]]
    source = _view(row[Field.SOURCE], shape, strides, torch.uint8)
    if axis is Axis.NONE:
        return source
    length, count = (row[Field.HEIGHT], row[Field.WIDTH])[axis], row[Field.TAPS]
    starts = _view(row[Field.STARTS], [length], [1], torch.int32)
    weights = _view(row[Field.WEIGHTS], [count, length], [length, 1], torch.int32)
    lines = source.movedim(axis, 0)
    total = torch.full((length, *lines.shape[1:]), 1 << (PRECISION - 1), dtype=torch.int32)
    for tap in range(count):
        places = (starts + tap).clamp_(max=row[Field.LAST])
        total.addcmul_(lines[places].int(), weights[tap].view(-1, 1, 1))
    return total.bitwise_right_shift_(PRECISION).clamp_(0, 255).to(torch.uint8).movedim(0, axis)


def _write(row: Row, canvas: Tensor, dtype: torch.dtype) -> None:
    """Lay a canvas out as rows of cells, in each copy."""
    merge, height, width = row[Field.MERGE], row[Field.CELL_HEIGHT], row[Field.CELL_WIDTH]
    squares = canvas.view(-1, merge, height, row[Field.SQUARES], merge, width, CHANNELS)
    cells = squares.permute(0, 3, 1, 4, 2, 5, 6).reshape(-1, height, width, CHANNELS)
    strides = [row[field] for field in (Field.TARGET_ROW, Field.TARGET_DOWN, Field.TARGET_RIGHT, Field.TARGET_CHANNEL)]
    copies = [row[Field.TARGET_COPY], *strides]
    _view(row[Field.TARGET], [row[Field.COPIES], *cells.shape], copies, dtype).copy_(cells)


def _view(address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory from an address on, as elements with these strides; the planner keeps it within its tensor."""
    count = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    buffer = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=count).as_strided(list(shape), list(strides))
