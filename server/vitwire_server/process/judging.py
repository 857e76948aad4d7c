"""`vitwire-server precision`: float8 compared with bfloat16 on an operator's checkpoint and photographs."""

import argparse
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path

import torch
from PIL import UnidentifiedImageError
from torch import Tensor

from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.core.budgets import Ladder
from vitwire_server.core.errors import EncoderError
from vitwire_server.core.files import read_regular
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.core.models import Precision
from vitwire_server.preparing import pillow
from vitwire_server.preparing.files import images
from vitwire_server.preparing.files.messages import NotDecoded
from vitwire_server.preparing.rules.patches import Pixels as Picture
from vitwire_server.preparing.rules.recipe import Recipe, recipes_of
from vitwire_server.process.capturing import graph_mode
from vitwire_server.process.computing import BelowFloor
from vitwire_server.process.loading import Computing, device_of, placed_tower
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.graphs import GraphSet, SimulatedRecorder
from vitwire_server.runtime.precision.similarity import least_cosines, norm_errors, rows_of

_log = logging.getLogger(__name__)
_DEFAULT_FLOOR = ServeSettings.model_fields["precision_floor"].default
_DAMAGED = (NotDecoded, EncoderError, *pillow.UNREADABLE, MemoryError)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What float8 changes in the rows of one photograph, compared with bfloat16."""

    file: str
    rows: int
    lowest: float
    """Cosine similarity of the least similar row."""
    median: float
    row: int
    """Number of that row, from 0."""
    norm_error: float
    """Largest error in norm of a row; unlike similarity, it counts a change of length."""
    below: int
    """Rows below the floor."""
    exact_lowest: float | None = None
    """Lowest similarity of bfloat16 to float32, if that was asked for."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for a directory of photographs."""

    photographs: Sequence[Judgement]
    skipped: Mapping[str, str]
    """Files that are not photographs the server takes, and why."""
    precision: Precision
    floor: float
    refusal: str
    """The sentence with which a server refuses to start with these settings; empty if it starts."""

    @property
    def passed(self) -> bool:
        """True if the server starts, and every row of the photographs reaches the floor."""
        return bool(self.photographs) and not self.refusal and not any(each.below for each in self.photographs)

    @property
    def flags(self) -> str:
        """The flags with which a server computes what was judged."""
        floor = "" if self.floor == _DEFAULT_FLOOR else f" --precision-floor {self.floor}"
        return f"--precision fp8{floor} --precision-blocks {self.precision.blocks or 'all'}"

    def document(self) -> dict[str, object]:
        """For JSON, with null for numbers that are not finite."""
        photographs = [
            {
                name: None if isinstance(each, float) and not isfinite(each) else each
                for name, each in asdict(one).items()
            }
            for one in self.photographs
        ]
        return {
            "photographs": photographs,
            "skipped": dict(self.skipped),
            "precision": asdict(self.precision),
            "floor": self.floor,
            "flags": self.flags if self.passed else "",
            "refusal": self.refusal,
            "passed": self.passed,
        }


def judge(settings: ServeSettings, options: argparse.Namespace) -> int:
    """Compare and print; returns the exit code. `settings` serve float8. Raises UsageError or CheckpointError."""
    files = sorted(path for path in options.images.rglob("*") if not path.is_dir())
    if not files:
        raise UsageError(f"--images {options.images}: expected a directory with photographs")
    served, refusal = _in_float8(settings)
    exact = _placed(_plain(settings, "bfloat16"))
    reference = _engine(_placed(_plain(settings, "float32"))) if options.float32 else None
    recipe = recipes_of(exact.preprocessing, exact.tower.geometry).get(Modality.IMAGE)
    if recipe is None:
        raise UsageError(f"--model {settings.model}: the server takes images of this model as pixels only")
    reduced, plain = _engine(served), _engine(exact)
    parts, skipped, found = 1 + exact.tower.geometry.levels, dict[str, str](), list[Judgement]()
    for path in files:
        name = str(path.relative_to(options.images))
        try:
            item = _item(path, recipe, exact, settings)
            expected = rows_of(plain, item)
        except _DAMAGED as error:
            skipped[name] = _reason(error)
            _log.warning("%s is skipped: %s", printable(name), skipped[name])
            continue
        rows = _rows_or_nan(reduced, item, expected)
        lowest = least_cosines(rows_of(reference, item), expected, parts).min() if reference else None
        found.append(_compared(name, expected, rows, parts, settings.precision_floor, lowest))
    assert served.precision
    verdict = Verdict(found, skipped, served.precision, settings.precision_floor, refusal)
    if options.json:
        print(json.dumps(verdict.document()))
    else:
        _show(verdict)
    return 0 if verdict.passed else 1


def _in_float8(settings: ServeSettings) -> tuple[Computing, str]:
    """The tower as it is served, or all of it in float8 and the sentence with which a server refuses it."""
    try:
        return _placed(settings), ""
    except BelowFloor as error:
        blocks = "all" if settings.precision_blocks == "auto" else settings.precision_blocks
        return _placed(settings.model_copy(update={"precision_floor": 0.0, "precision_blocks": blocks})), str(error)


def _plain(settings: ServeSettings, dtype: str) -> ServeSettings:
    """The settings of a plain forward."""
    return settings.model_copy(update={"precision": "auto", "dtype": dtype, "compile": "off"})


def _placed(settings: ServeSettings) -> Computing:
    device = device_of(settings.device)
    return placed_tower(settings, device, captured=graph_mode(settings.graphs, device) == "cuda")


def _engine(computing: Computing) -> Engine:
    graphs = GraphSet(computing.tower, Ladder(), SimulatedRecorder())
    return Engine(computing.tower, graphs, computing.stager, computing.streams)


def _item(path: Path, recipe: Recipe, computing: Computing, settings: ServeSettings) -> Item:
    """The photograph as the server prepares it on a CPU. Raises NotDecoded, EncoderError, OSError or ValueError."""
    data = read_regular(path, settings.max_encoded_bytes)
    measured = images.measure(data, recipe, settings.max_image_pixels)
    grid, most = Grid(*measured.grid), settings.max_patches_per_item
    if grid.patches > most:
        raise ValueError(f"{grid.patches} patches exceed --max-patches-per-item {most}")
    tiles = pillow.image(images.decode(data, recipe), recipe)
    crops = _pixels(tiles.crops) if tiles.crops is not None else None
    footprint = computing.tower.footprint(grid)
    return Item(Modality.IMAGE, grid, _pixels(tiles.pixels), footprint, DType.FLOAT32, crops=crops)


def _pixels(picture: Picture) -> Pixels:
    return Pixels(picture.tobytes(), DType.UINT8, picture.shape)


def _rows_or_nan(engine: Engine, item: Item, like: Tensor) -> Tensor:
    """The item's rows; NaN if they are not finite, or encoding fails otherwise."""
    try:
        return rows_of(engine, item)
    except EncoderError as error:
        _log.warning("%s", error)
        return torch.full_like(like, torch.nan)


def _compared(
    name: str, expected: Tensor, rows: Tensor, parts: int, floor: float, exact_lowest: Tensor | None
) -> Judgement:
    cosines = least_cosines(expected, rows, parts)
    return Judgement(
        file=name,
        rows=len(cosines),
        lowest=float(cosines.min()),
        median=float(cosines.median()),
        row=int(cosines.argmin()),
        norm_error=float(norm_errors(expected, rows, parts).max()),
        below=int((~(cosines >= floor)).sum()),  # also those that are not finite
        exact_lowest=None if exact_lowest is None else float(exact_lowest),
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "is not a JPEG, PNG, WebP, GIF or BMP image"
    return " ".join(str(error).split()) or type(error).__name__


def printable(name: str) -> str:
    """A file's name without what a terminal would interpret, or could not show."""
    return "".join(each if each.isprintable() else "?" for each in name)


def _show(verdict: Verdict) -> None:
    from rich.console import Console  # noqa: PLC0415 - only for this output
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    with_exact = any(each.exact_lowest is not None for each in verdict.photographs)
    more = ["bfloat16 to float32"] if with_exact else []
    table = Table("file", "rows", "lowest", "in row", "median", "norm error", "below", *more)
    for each in verdict.photographs:
        numbers = f"{each.lowest:.5f}", str(each.row), f"{each.median:.5f}", f"{each.norm_error:.4f}", str(each.below)
        exact = [f"{each.exact_lowest:.5f}"] if each.exact_lowest is not None else []
        table.add_row(Text(printable(each.file)), str(each.rows), *numbers, *exact)
    Console(width=120).print(table)
    print("\n".join(_summary(verdict)))


def _summary(verdict: Verdict) -> Iterator[str]:
    rows, below = (sum(getattr(each, name) for each in verdict.photographs) for name in ("rows", "below"))
    blocks = f"blocks {verdict.precision.blocks}" if verdict.precision.blocks else "all blocks"
    yield f"{verdict.precision.layers} linear layers in {verdict.precision.type}: {blocks}"
    yield f"{len(verdict.photographs)} photographs, {rows} rows, {below} below {verdict.floor}"
    for name, reason in verdict.skipped.items():
        yield f"skipped {printable(name)}: {printable(reason)}"
    if verdict.refusal:
        yield f"a server does not start with these settings: {verdict.refusal}"
    elif not verdict.photographs:
        yield "no photograph could be judged"
    elif below:
        yield f"serve without --precision fp8, or judge fewer blocks: a higher --precision-floor than {verdict.floor}"
    else:
        yield f"serve with {verdict.flags}"
