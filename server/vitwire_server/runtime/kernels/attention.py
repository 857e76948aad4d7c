"""Attention within packed segments, with a launch grid that depends on rows rather than on slots.

Variable-length flash attention launches `slots * longest / block` programs, most of them for slots without a segment.
Here a list of tiles says which rows a program works on, so the grid has `rows / block + slots` programs, whatever the
longest segment. A program never mixes segments, so NaN does not spread between items. Softmax is computed online
(Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135). Scores of heads of 72 or 80 columns are
computed as 64 + 16 rather than padded to 128. `operands.py` has the sizes of blocks, by the device.
"""

from functools import lru_cache

import torch
import triton
from torch import Tensor
from torch.nn import functional
from triton import language as tl

from vitwire_server.runtime.devices import architecture
from vitwire_server.runtime.kernels.dependent import begin, constants_of, end, is_dependent
from vitwire_server.runtime.kernels.launching import Bound, Kernel
from vitwire_server.runtime.kernels.operands import AttentionTile, Segments, attention_division, attention_tile

_LOG2_E = 1.4426950408889634
_FEW_KEYS = 16
_SHORT = 1024
"""Up to this segment length, a last block of few keys is computed as `_FEW_KEYS`: 224 x 224 pixels are 3 * 64 + 4
patches. In longer segments it does not pay for the registers."""
_DENSE = 8192
"""Segment length in patches above which cuDNN is used if possible."""


def segment_tiles(segments: Segments, rows: int, heads: int) -> Tensor:
    """The tiles for `segment_attention`, `(tiles, 4)` int32, the same for every layer of a forward.

    Each is its first row, the end of its segment's rows, and where the segment's keys begin and end; unused tiles are
    zero, and last.
    """
    on = architecture(segments.boundaries.device)
    return tiles_of(segments, rows, attention_division(rows, heads, segments.longest, on).rows)


def tiles_of(segments: Segments, rows: int, size: int) -> Tensor:
    """As `segment_tiles`, of `size` rows each."""
    keys, _ = segments.keys()
    return _tiles(segments.boundaries, keys, keys[1:], rows, size)


def padded_tiles(held: Tensor, rows: int, heads: int) -> tuple[Segments, Tensor]:
    """Segments and tiles for `segment_attention` of images of `rows` rows each.

    Rows `held[i]` and later of image `i` are padding: they attend to the rows before only, which attend to all.
    `held` is `(images,)` int32.
    """
    first = torch.arange(0, len(held) * rows, rows, dtype=torch.int32, device=held.device)
    padding, last = first + held, first + rows
    boundaries = torch.cat([torch.stack([first, padding], 1).flatten(), last[-1:]])
    keys = first.repeat_interleave(2), torch.stack([last, padding], 1).flatten()
    division = attention_division(len(held) * rows, heads, rows, architecture(held.device))
    return Segments(boundaries, rows), _tiles(boundaries, *keys, len(held) * rows, division.rows)


def _tiles(boundaries: Tensor, first_keys: Tensor, last_keys: Tensor, rows: int, size: int) -> Tensor:
    """Tiles of segments, whose keys begin at `first_keys` and end at `last_keys`, of each segment."""
    slots = len(boundaries) - 1
    tiles = torch.empty((triton.cdiv(rows, size) + slots, 4), dtype=torch.int32, device=boundaries.device)
    _map[(len(tiles),)](boundaries, first_keys, last_keys, slots, size, tiles, CHUNK=256, num_warps=4)
    return tiles


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, tiles: Tensor | None = None
) -> Tensor:
    """Attention of `q, k, v (rows, heads, head_dim)` within segments, as `Attend`.

    Heads of a row must be contiguous; rows may be strided, as in the output of one linear layer for all three. `tiles`
    come from `segment_tiles`. Returns a contiguous `(rows, heads, head_dim)`. On a CPU it runs only in Triton's
    interpreter.
    """
    longest = segments.longest
    rows, heads, head_dim = q.shape
    if longest > _DENSE and segments.key_boundaries is None and rows == (len(segments.boundaries) - 1) * longest:
        # cuDNN is faster, even with a plan for each shape.
        query, key, value = (x.unflatten(0, (-1, longest)).transpose(1, 2) for x in (q, k, v))
        attended = functional.scaled_dot_product_attention(query, key, value, scale=scale)
        return attended.transpose(1, 2).flatten(0, 1).contiguous()
    out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    tiles = segment_tiles(segments, rows, heads) if tiles is None else tiles
    on, count = architecture(q.device), tiles.shape[0]
    division = attention_division(rows, heads, longest, on)
    tile = attention_tile(division, head_dim, q.element_size(), on)
    few = max(longest, segments.most_keys) <= _SHORT
    grid = (min(division.programs, count * heads),) if division.programs else (count, heads)
    launch = _bound(tile, head_dim, heads, few, division.programs > 0, is_dependent(q.device))
    strides = q.stride(0), k.stride(0), v.stride(0), heads * head_dim
    launch(grid, q, k, v, out, tiles, count * heads, scale * _LOG2_E, *strides)
    return out


@lru_cache
def _bound(tile: AttentionTile, head_dim: int, heads: int, few: bool, turns: bool, dependent: bool) -> Bound:
    """The kernel for programs of this tile, which take turns or not; `few` keys at the end may have a small block."""
    return _attend.bound(
        HEAD_DIM=head_dim,
        HEADS=heads,
        ROWS=tile.rows,
        KEYS=tile.keys,
        WHOLE=tile.whole,
        REST=tile.rest,
        SPARE=tile.spare,
        FEW=_FEW_KEYS if few else 0,
        TURNS=turns,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **constants_of(dependent),
    )


@Kernel
@triton.jit(do_not_specialize=["slots", "rows"])
def _map(ends_ptr, first_keys_ptr, last_keys_ptr, slots, rows, tiles_ptr, CHUNK: tl.constexpr):
    tile = tl.program_id(0)
    first = 0
    last = 0
    begin = 0
    end = 0
    before = 0
    for chunk in range(0, slots, CHUNK):
        slot = chunk + tl.arange(0, CHUNK)
        there = slot < slots
        left = tl.load(ends_ptr + slot, mask=there, other=0)
        right = tl.load(ends_ptr + slot + 1, mask=there, other=0)
        tiles = (right - left + rows - 1) // rows
        after = before + tl.cumsum(tiles, 0)
        own = (after > tile) & (after - tiles <= tile)
        first += tl.sum(tl.where(own, left + (tile - after + tiles) * rows, 0), 0)
        last += tl.sum(tl.where(own, right, 0), 0)
        begin += tl.sum(tl.load(first_keys_ptr + slot, mask=own, other=0), 0)
        end += tl.sum(tl.load(last_keys_ptr + slot, mask=own, other=0), 0)
        before += tl.sum(tiles, 0)
    tl.store(tiles_ptr + 4 * tile, first)
    tl.store(tiles_ptr + 4 * tile + 1, last)
    tl.store(tiles_ptr + 4 * tile + 2, begin)
    tl.store(tiles_ptr + 4 * tile + 3, end)


@Kernel
@triton.jit(do_not_specialize=["units"])
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tiles_ptr,
    units,
    scale,
    q_row,
    k_row,
    v_row,
    out_row,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    REST: tl.constexpr,
    SPARE: tl.constexpr,
    FEW: tl.constexpr,
    TURNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    begin(DEPENDENT)
    pointers = (q_ptr, k_ptr, v_ptr, out_ptr)
    strides = (q_row, k_row, v_row, out_row)
    if TURNS:
        for unit in range(tl.program_id(0), units, tl.num_programs(0)):
            tile, head = unit // HEADS, unit % HEADS
            _tile(pointers, strides, tiles_ptr, tile, head, scale, HEAD_DIM, ROWS, KEYS, WHOLE, REST, SPARE, FEW)
    else:
        tile, head = tl.program_id(0), tl.program_id(1)
        _tile(pointers, strides, tiles_ptr, tile, head, scale, HEAD_DIM, ROWS, KEYS, WHOLE, REST, SPARE, FEW)
    end(DEPENDENT)


@triton.jit
def _tile(
    pointers,
    strides,
    tiles_ptr,
    number,
    head,
    scale,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    REST: tl.constexpr,
    SPARE: tl.constexpr,
    FEW: tl.constexpr,
):
    """Attention of the rows of one tile and one head, unless the tile is unused."""
    q_ptr, k_ptr, v_ptr, out_ptr = pointers
    q_row, k_row, v_row, out_row = strides
    tile = tiles_ptr + 4 * number
    first, edge = tl.load(tile), tl.load(tile + 1)
    start, last = tl.load(tile + 2), tl.load(tile + 3)
    if edge > 0:
        q_ptr += head * HEAD_DIM
        k_ptr += head * HEAD_DIM
        v_ptr += head * HEAD_DIM
        rows = first + tl.arange(0, ROWS)
        inside = rows < edge
        columns = tl.arange(0, WHOLE)
        at = rows.to(tl.int64)
        q = tl.load(q_ptr + at[:, None] * q_row + columns[None, :], mask=inside[:, None], other=0.0)
        if REST:
            more = tl.arange(0, REST)
            wanted = inside[:, None] & (more < HEAD_DIM - WHOLE)[None, :]
            q_rest = tl.load(q_ptr + at[:, None] * q_row + (WHOLE + more)[None, :], mask=wanted, other=0.0)
        else:
            q_rest = q
        q = (q, q_rest)
        top, weight = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        state = (top, weight, tl.zeros([ROWS, WHOLE], tl.float32), tl.zeros([ROWS, SPARE], tl.float32))
        full = start + (last - start) // KEYS * KEYS
        most = tl.where(last - full > FEW, last, full)
        state = _keys(state, q, k_ptr, v_ptr, start, full, scale, k_row, v_row, HEAD_DIM, KEYS, WHOLE, REST, False)
        state = _keys(state, q, k_ptr, v_ptr, full, most, scale, k_row, v_row, HEAD_DIM, KEYS, WHOLE, REST, True)
        if FEW:
            state = _keys(state, q, k_ptr, v_ptr, most, last, scale, k_row, v_row, HEAD_DIM, FEW, WHOLE, REST, True)
        _, weight, out, out_rest = state
        out_ptr += head * HEAD_DIM
        values = (out / weight[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at[:, None] * out_row + columns[None, :], values, inside[:, None])
        if REST:
            values = (out_rest / weight[:, None]).to(out_ptr.dtype.element_ty)
            spare = tl.arange(0, SPARE)
            wanted = inside[:, None] & (spare < HEAD_DIM - WHOLE)[None, :]
            tl.store(out_ptr + at[:, None] * out_row + (WHOLE + spare)[None, :], values, wanted)


@triton.jit
def _keys(
    state,
    queries,
    k_ptr,
    v_ptr,
    start,
    stop,
    scale,
    k_row,
    v_row,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    REST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Process keys from `start` to `stop`; only the last, partial block has keys beyond `stop`."""
    top, weight, out, out_rest = state
    q, q_rest = queries
    columns = tl.arange(0, WHOLE)
    spare = tl.arange(0, out_rest.shape[1])
    for block in tl.range(start, stop, KEYS, num_stages=1 if LAST else None):
        keys = block + tl.arange(0, KEYS)
        at = keys.to(tl.int64)
        inside = keys < stop
        k_at = k_ptr + at[:, None] * k_row + columns[None, :]
        v_at = v_ptr + at[:, None] * v_row + columns[None, :]
        if LAST:
            k = tl.load(k_at, mask=inside[:, None], other=0.0)
            v = tl.load(v_at, mask=inside[:, None], other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST:
            more = tl.arange(0, REST)
            kept = (more < HEAD_DIM - WHOLE)[None, :]
            wanted = inside[:, None] & kept if LAST else kept
            k_rest = tl.load(k_ptr + at[:, None] * k_row + (WHOLE + more)[None, :], mask=wanted, other=0.0)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores = scores * scale
        if LAST:
            scores = tl.where(inside[None, :], scores, -float("inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        shares = tl.exp2(scores - highest[:, None])
        fade = tl.exp2(top - highest)
        weight = weight * fade + tl.sum(shares, 1)
        top = highest
        shares = shares.to(v.dtype)
        out = tl.dot(shares, v, out * fade[:, None], input_precision="ieee")
        if REST:
            kept = (spare < HEAD_DIM - WHOLE)[None, :]
            wanted = inside[:, None] & kept if LAST else kept
            v_rest = tl.load(v_ptr + at[:, None] * v_row + (WHOLE + spare)[None, :], mask=wanted, other=0.0)
            out_rest = tl.dot(shares, v_rest, out_rest * fade[:, None], input_precision="ieee")
    return top, weight, out, out_rest
