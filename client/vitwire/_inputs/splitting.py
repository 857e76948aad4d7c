"""A processor's tensors of a whole batch, cut into the tensors of each item."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from vitwire._inputs.tensors import Batch, Tensor, check_rank, integers, invalid, outline, rank, rows
from vitwire.model import TileShapes

_FORMS = {1: "numbers of tiles", 2: "pairs (height, width)", 3: "grids (t, h, w)"}
Layout = tuple[int, int]
"""Rows and columns, or height and width."""
_HINT = "pass one (t, h, w) per item, as in [(1, 8, 8)]"


class Cut(NamedTuple):
    """The tensors and the grid of one item."""

    pixels: Tensor
    grid: tuple[int, int, int]
    crops: Tensor | None = None


class Grids(NamedTuple):
    """The size of each item by a processor's output, and the field it comes from."""

    field: str
    entries: list[tuple[int, ...]]
    """All numbers of tiles, or all (height, width), or all (t, h, w)."""

    @property
    def sides(self) -> int:
        return len(self.entries[0]) if self.entries else 0

    def patches(self) -> list[int]:
        """Patches, or tiles, of each item."""
        return [math.prod(entry) for entry in self.entries]

    def triples(self) -> list[tuple[int, int, int]]:
        """The grid of each item: a number of tiles is `(tiles, 1, 1)`, and a size in patches `(1, h, w)`."""
        before, after = {1: ((), (1, 1)), 2: ((1,), ()), 3: ((), ())}[self.sides]
        return [(*before, *entry, *after) for entry in self.entries]  # type: ignore[misc]  # three sides

    def check_count(self, batch: Batch, field: str, what: str) -> None:
        """Raises InvalidItem unless the batch has one of `what` for each entry."""
        if len(batch) != len(self.entries):
            raise invalid(field, f"has {len(batch)} {what}, {self.field} has {len(self.entries)} entries")

    @classmethod
    def of(cls, field: str, value: object, least: int = 1) -> "Grids":
        """From a tensor, an array or a list of numbers from `least`. Raises InvalidItem, which names the entry."""
        found = _plain(value)
        if not isinstance(found, list):
            raise invalid(field, f"expected one entry per item, got {found!r}")
        entries = [_entry(field, at, each, least) for at, each in enumerate(found)]
        for at, entry in enumerate(entries):
            if len(entry) != len(entries[0]):
                raise invalid(f"{field}[{at}]", f"expected {_FORMS[len(entries[0])]} as before, got {entry}", at)
        return cls(field, entries)


def cut(  # noqa: PLR0911  # one for each layout
    batch: Batch, field: str, grids: Grids, patch_size: int | None = None
) -> list[Cut]:
    """The items of a batch. Raises InvalidItem if the batch and the grids disagree.

    patch_size: to cut whole images, whose sizes are given in pixels, into patches.
    """
    if not grids.entries:
        if len(batch):
            raise invalid(field, f"has {len(batch)} rows, {grids.field} is empty")
        return []
    counts, total = grids.patches(), len(batch)
    tiles = [triple[0] for triple in grids.triples()]
    match grids.sides, rank(batch):
        case (1, 4) | (2, 2) | (3, 2):
            return _consecutive(batch, field, grids, counts)
        case (3, 4) if sum(tiles) == total:
            return _consecutive(batch, field, grids, tiles)
        case (2, 4) if sum(counts) != total:
            return _images(batch, field, grids, patch_size)
        case (2, 4) | (3, 4):
            cuts = _consecutive(batch, field, grids, counts)
            return [own._replace(pixels=own.pixels.reshape(len(own.pixels), -1)) for own in cuts]
        case (2, 3) | (3, 3):
            return _padded(batch, field, grids, counts)
        case (1, 5) | (3, 5):
            return _padded(batch, field, grids, tiles)
        case (1, 2 | 3):
            raise invalid(grids.field, f"has {_FORMS[1]}, but {field} has patches: {_HINT}")
    raise invalid(field, f"expected patches or tiles for {_FORMS[grids.sides]}, got {outline(batch)}")


def cut_with_crops(batch: Batch, field: str, grids: Grids, crops: Batch, crops_field: str) -> list[Cut]:
    """The items of towers with two views: one picture of each image, and crops of some, or of all.

    The grids are numbers of crops, or (1 + crops, rows, columns). If all are 1 or (1, 1, 1) and there are as many
    crops as pictures, each picture comes in two sizes.
    """
    for name, each in ((field, batch), (crops_field, crops)):
        check_rank(each, name, 4, "pictures (count, 3, H, W)")
    grids.check_count(batch, field, "pictures")
    if grids.sides == 2:
        raise invalid(grids.field, "expected numbers of crops or grids (1 + crops, rows, columns), got pairs")
    triples = grids.triples()
    pairs = len(crops) == len(batch) and all(t == 1 for t, _, _ in triples)
    counts = [t - (grids.sides == 3 and not pairs) for t, _, _ in triples]
    if grids.sides == 1 and not pairs:
        triples = [(1 + count, 1, 1) for count in counts]
    parts = _ranges(counts, len(crops), crops_field, grids.field)
    return [
        Cut(rows(batch, at, at + 1), grid, rows(crops, *part) if counts[at] else None)
        for at, (grid, part) in enumerate(zip(triples, parts, strict=True))
    ]


def cut_slices(batch: Batch, field: str, sizes: object, sizes_field: str) -> list[Cut]:
    """Each slice `(C, p, patches * p)`, whose patches lie side by side, as an item of rows of patches.

    `sizes` are pairs (height, width) in patches, in lists of one prompt each.
    """
    pairs = _plain(sizes)
    if not isinstance(pairs, list) or not all(isinstance(own, list) for own in pairs):
        raise invalid(sizes_field, "expected a list of pairs (height, width) for each prompt")
    grids = Grids.of(sizes_field, [pair for own in pairs for pair in own])
    if len(batch) and (rank(batch) != 4 or grids.sides != 2):
        raise invalid(field, f"expected slices (C, p, patches * p) and their sizes in patches, got {outline(batch)}")
    grids.check_count(batch, field, "slices")
    found = []
    for at, (own, count, grid) in enumerate(zip(batch, grids.patches(), grids.triples(), strict=True)):
        _, side, length = own.shape
        if length != count * side:
            reason = f"has {length} columns, {sizes_field} needs {count} patches of {side}"
            raise invalid(f"{field}[{at}]", reason, at)
        found.append(Cut(_side_by_side(own), grid))
    return found


def patches_of_strip(batch: Batch, field: str) -> Batch:
    """Rows of patches of the slices of a batch, all in one strip `(1, C, p, patches * p)`."""
    if isinstance(batch, list) or rank(batch) != 4 or len(batch) != 1:
        raise invalid(field, f"expected one strip of patches (1, C, p, patches * p), got {len(batch)} entries")
    return _side_by_side(batch[0])


def with_overviews(layouts: Grids, *, always: bool = False) -> Grids:
    """Grids of images that were cut in rows and columns, with a tile of the whole image, `always` or behind several."""
    tiles = layouts.patches()
    return Grids(
        layouts.field,
        [(count + (always or count > 1), *layout) for count, layout in zip(tiles, layouts.entries, strict=True)],
    )


def beside_overviews(key: str, value: object) -> Grids:
    """Grids of images that were cut in (columns, rows), with a tile of the whole image; zeros are padding."""
    cuts = [(columns, rows) for columns, rows in _pairs(key, value, "columns, rows") if columns and rows]
    return Grids(key, [(1 + columns * rows, rows, columns) for columns, rows in cuts])


def fitted(key: str, value: object, tiles: TileShapes) -> Grids:
    """Grids of images of these sizes, cut in the layout that keeps most of each, after a tile of the whole image."""
    cuts = [_layout_of_most(size, tiles.tile, tiles.layouts) for size in _pairs(key, value, "height, width")]
    return Grids(key, [(1 + rows * columns, rows, columns) for rows, columns in cuts])


def _pairs(key: str, value: object, what: str) -> list[Layout]:
    pairs = integers(value, key)
    if pairs.ndim < 2 or pairs.shape[-1] != 2:
        raise invalid(key, f"expected pairs ({what}), got the shape {pairs.shape}")
    return [(int(first), int(second)) for first, second in pairs.reshape(-1, 2)]


def _layout_of_most(picture: Layout, tile: Layout, layouts: Sequence[Layout]) -> Layout:
    """The layout that keeps most pixels of the image; in a tie, the smallest."""
    height, width = picture

    def kept(layout: Layout) -> Layout:
        down, across = layout[0] * tile[0], layout[1] * tile[1]
        scale = min(across / width, down / height)
        effective = min(int(width * scale) * int(height * scale), width * height)
        return effective, effective - down * across

    return max(layouts, key=kept)


def without_padding(batch: Batch) -> list[int]:
    """The number of tiles of each image, without tiles of zeros at its end, which are padding.

    Pixels of an image are not exactly zero after normalisation, as the mean is not a whole number.
    """
    found = []
    for tiles in batch:
        count = len(tiles)
        while count > 1 and not bool(tiles[count - 1].any()):
            count -= 1
        found.append(count)
    return found


def _consecutive(batch: Batch, field: str, grids: Grids, counts: Sequence[int]) -> list[Cut]:
    """Items that lie one after the other along the first axis."""
    parts = _ranges(counts, len(batch), field, grids.field)
    return [Cut(rows(batch, *part), grid) for part, grid in zip(parts, grids.triples(), strict=True)]


def _ranges(counts: Sequence[int], total: int, field: str, grid_field: str) -> list[tuple[int, int]]:
    """Start and end of each item. Raises InvalidItem unless they add up to all rows."""
    end, found = 0, []
    for at, count in enumerate(counts):
        found.append((end, end + count))
        end += count
        if end > total:
            raise invalid(f"{grid_field}[{at}]", f"needs rows {end - count} to {end} of {field}, which has {total}", at)
    if end < total:
        raise invalid(field, f"has {total} rows, {grid_field} adds up to {end}")
    return found


def _padded(batch: Batch, field: str, grids: Grids, counts: Sequence[int]) -> list[Cut]:
    """Items of an axis of their own, padded with zeros to one length."""
    grids.check_count(batch, field, "items")
    found = []
    for at, (count, grid) in enumerate(zip(counts, grids.triples(), strict=True)):
        own = batch[at]
        if len(own) < count:
            raise invalid(f"{grids.field}[{at}]", f"needs {count} rows, {field}[{at}] has {len(own)}", at)
        if bool(own[count:].any()):
            reason = f"has {len(own)} rows, {grids.field}[{at}] needs {count}, and the others are not padding"
            raise invalid(f"{field}[{at}]", reason, at)
        found.append(Cut(own[:count], grid))
    return found


def _images(batch: Batch, field: str, grids: Grids, patch_size: int | None) -> list[Cut]:
    """Whole images `(3, H, W)`, padded to one size, as patches line by line."""
    if not patch_size:
        raise invalid(field, "has whole images: pass the model, whose patch size they are cut by")
    grids.check_count(batch, field, "images")
    found = []
    for at, (height, width) in enumerate(grids.entries):
        image = batch[at]
        if height > image.shape[1] or width > image.shape[2] or height % patch_size or width % patch_size:
            size = f"{height}x{width} is not a size in patches of {patch_size} within {outline(image)}"
            raise invalid(f"{grids.field}[{at}]", size, at)
        down, across = height // patch_size, width // patch_size
        blocks = image[:, :height, :width].reshape(image.shape[0], down, patch_size, across, patch_size)
        found.append(Cut(_reordered(blocks, 1, 3, 0, 2, 4).reshape(down * across, -1), (1, down, across)))
    return found


def _side_by_side(strip: Tensor) -> Tensor:
    """Rows of patches of a strip `(C, p, patches * p)`."""
    channels, side, _ = strip.shape
    return _reordered(strip.reshape(channels, side, -1, side), 2, 0, 1, 3).reshape(-1, channels * side * side)


def _reordered(tensor: Tensor, *axes: int) -> Tensor:
    return tensor.permute(*axes) if hasattr(tensor, "permute") else tensor.transpose(axes)


def _plain(value: object) -> object:
    """Tensors, arrays and nested lists of them as nested lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _entry(field: str, at: int, value: object, least: int) -> tuple[int, ...]:
    sides: list[Any] = value if isinstance(value, list) else [value]
    whole = all(isinstance(side, int | float) and not isinstance(side, bool) and side == side // 1 for side in sides)
    if not whole or not 1 <= len(sides) <= 3:
        raise invalid(f"{field}[{at}]", f"expected (t, h, w), or a number of tiles, got {value!r}", at)
    if min(sides) < least:
        raise invalid(f"{field}[{at}]", f"expected whole numbers of at least {least}, got {value!r}", at)
    return tuple(int(side) for side in sides)
