"""Description of the model that a server holds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from uuid import uuid4

from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Modality
from vitwire_server.core.pooling import Pooling
from vitwire_server.core.sampling import Sampling
from vitwire_server.core.tilings import Tiling

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a tower that clients, codec and planner need to know, for towers of patches."""

    patch: int
    merge: int
    temporal: int
    channels: int
    width: int
    """Columns of a row, deepstack included."""
    levels: int
    """Deepstack levels: a row is `[main | level 0 | level 1 | ...]`."""
    raster: bool = False
    """Patches come row by row of the whole image, rather than token by token."""
    channels_last: bool = False
    """The columns of a patch are (p, p, C), rather than (C, T, p, p)."""
    longest_side: int | None = None
    """Rows and columns of a frame at most, in patches, if positions are looked up in a table."""
    one_row: bool = False
    """Rows are pooled: an image, and each frame of a clip, has one."""
    line_ends: bool = False
    """Each line of tokens has one more row behind it."""

    def columns(self, *, frames: int) -> int:
        """Columns of a patch that holds `frames` frames."""
        return self.channels * frames * self.patch * self.patch

    @property
    def row(self) -> int:
        """Elements of one row of the tower's input."""
        return self.columns(frames=self.temporal)

    @property
    def crop_row(self) -> int:
        """Elements of one row of its second input; 0 if it takes none."""
        return 0

    def patches(self, grid: Grid) -> int:
        """Patches that an item of this grid has."""
        return grid.patches

    def shapes(self, grid: Grid, modality: Modality) -> list[Shape]:
        """The shapes that the pixels of an item may have."""
        full = (grid.patches, self.columns(frames=self.temporal))
        single = (grid.patches, self.columns(frames=1))
        return [full] if modality is Modality.VIDEO or full == single else [full, single]

    def crops(self, grid: Grid) -> Shape | None:
        """The shape of an item's crops; None if an item of this grid has none."""
        del grid
        return None

    @property
    def prunes(self) -> bool:
        """Whether each token is of one frame, so that tokens of a clip can be left out one by one."""
        return not self.one_row and not self.line_ends

    def wrong(self, grid: Grid, modality: Modality | None) -> Iterator[tuple[str, str]]:
        """Faults of a grid of positive sides: the side, empty for all of them, and the reason."""
        for name, value in (("h", grid.h), ("w", grid.w)):
            if value % self.merge:
                yield name, f"must be a multiple of the merge size {self.merge}, got {value}"
            elif self.longest_side is not None and value > self.longest_side:
                yield name, f"must be at most {self.longest_side} for this model, got {value}"
        if modality is Modality.IMAGE and grid.t > 1:
            yield "t", f"must be 1 for an image, got {grid.t}"


@dataclass(frozen=True, slots=True)
class ClipGeometry(Geometry):
    """Sizes of a tower of patches that restricts the frames of a clip."""

    most_frames: int | None = None
    """Frames of a clip at most."""
    pooled: int = 1
    """Frames that a clip's token is made of; a clip has a multiple of that number; 0 for all."""
    clip_merge: int = 1
    """Root of the tokens of an image that a token of a clip is made of; if above 1, clips have two frames or more."""

    @property
    def prunes(self) -> bool:
        return self.pooled == self.clip_merge == 1

    def wrong(self, grid: Grid, modality: Modality | None) -> Iterator[tuple[str, str]]:
        # Not super(): slots=True creates a second class, which super() does not refer to.
        yield from Geometry.wrong(self, grid, modality)
        if self.most_frames is not None and grid.t > self.most_frames:
            yield "t", f"must be at most {self.most_frames} for this model, got {grid.t}"
        if self.pooled > 1 and grid.t > 1 and grid.t % self.pooled:
            yield "t", f"must be 1 or a multiple of {self.pooled} for this model, got {grid.t}"
        if self.clip_merge > 1 and modality is Modality.VIDEO:
            if grid.t == 1:
                yield (
                    "t",
                    "must be at least 2 for a clip of this model, which merges more patches of clips than of images",
                )
            side = self.merge * self.clip_merge
            for name, value in (("h", grid.h), ("w", grid.w)):
                if value % side:
                    yield name, f"must be a multiple of the merge size of clips {side}, got {value}"


@dataclass(frozen=True, slots=True)
class TileGeometry(Geometry):
    """Sizes of a tower that takes tiles of one size.

    A grid is (tiles, rows, columns): an image is one tile, or cut in rows x columns tiles, after which
    one more may show all of it; each frame of a clip is one tile. No row depends on the layout,
    so (tiles, 1, 1) stands for tiles of an unknown layout. Crops are either
    those tiles, in another size than the one that shows all of the image (`crops_replace`), or a second
    copy of every tile.
    """

    tile: tuple[int, int] = (0, 0)
    """Height and width of a tile, in pixels."""
    crop: tuple[int, int] | None = None
    """Height and width of a crop; None if the tower takes none."""
    crops_replace: bool = False
    """Pixels hold only the overview; the tiles come as crops."""
    merged: bool = False
    """Rows depend on the layout, and every image has one tile more than that, which shows all of it."""

    @property
    def row(self) -> int:
        return self.channels * self.tile[0] * self.tile[1]

    @property
    def crop_row(self) -> int:
        return self.channels * self.crop[0] * self.crop[1] if self.crop else 0

    def patches(self, grid: Grid) -> int:
        tiles, crops = self.split(grid)
        area = tiles * self.tile[0] * self.tile[1]
        if self.crop:
            area += crops * self.crop[0] * self.crop[1]
        return area // self.patch**2

    def split(self, grid: Grid) -> tuple[int, int]:
        """Rows of an item's pixels, and of its crops."""
        if self.crops_replace:
            return 1, grid.t - 1
        return grid.t, grid.t if self.crop else 0

    def shapes(self, grid: Grid, modality: Modality) -> list[Shape]:
        del modality
        return [(self.split(grid)[0], self.channels, *self.tile)]

    def crops(self, grid: Grid) -> Shape | None:
        _, rows = self.split(grid)
        return (rows, self.channels, *self.crop) if self.crop and rows else None

    def wrong(self, grid: Grid, modality: Modality | None) -> Iterator[tuple[str, str]]:
        tiles = grid.h * grid.w
        if self.merged and grid.t != tiles + 1:
            yield "t", f"must be {tiles + 1} for {grid.h} rows and {grid.w} columns of tiles, got {grid.t}"
        elif modality is Modality.VIDEO:
            if tiles != 1:
                yield "", f"of a clip is (frames, 1, 1), got {grid}"
            elif self.crops_replace and grid.t > 1:
                yield "t", f"must be 1, as this model takes each frame as a separate item, got {grid.t}"
        elif tiles > 1 and grid.t not in ((tiles + 1,) if self.crops_replace else (tiles, tiles + 1)):
            fitting = f"{tiles + 1}" if self.crops_replace else f"{tiles} or {tiles + 1}"
            yield (
                "t",
                f"must be {fitting} for {grid.h} rows and {grid.w} columns of tiles, got {grid.t}; "
                "where rows and columns are not known, the grid is (t, 1, 1)",
            )


class Resizing(StrEnum):
    """Rule for the size that an image is resized to before it is cut into patches."""

    AREA = "area"
    """Its area: within the bounds, nearly in its own shape."""
    ENLARGED_AREA = "enlarged_area"
    """Its area, once a side shorter than a token was enlarged to one."""
    LONGEST_SIDE = "longest_side"
    """Its longer side, which is at most the root of the upper bound; then up to whole tokens."""
    MOST_PATCHES = "most_patches"
    """Its whole patches within the bounds, a number met as closely as its shape allows, by rounding up."""
    MOST_TOKENS = "most_tokens"
    """The upper bound, met as closely as whole tokens allow, by rounding down."""
    OTHER = "other"
    """A way that is not known here: pictures are not prepared."""


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """Preparation of pixels of one modality: `(pixel * rescale_factor - mean) / std` per channel."""

    min_pixels: int
    max_pixels: int
    """Area bounds of the resized image; of a whole clip if `bounds_span_frames`."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float
    resample: int
    """Pillow's number of the filter."""
    bounds_span_frames: bool = False
    resizing: Resizing = Resizing.AREA
    crop_mean: tuple[float, ...] = ()
    crop_std: tuple[float, ...] = ()
    """Normalisation of crops; empty if the tiles' is used."""
    tiling: Tiling | None = None
    """Cuts images, for towers that take tiles."""
    drops_transparency: bool = False
    """Transparency is dropped; otherwise images are put on white."""
    sampling: Sampling | None = None
    """Chooses frames of encoded clips; None if clips come as pixels only."""

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the settings that a request may replace."""
        by_area = self.tiling is None and self.resizing in (Resizing.AREA, Resizing.ENLARGED_AREA)
        return ("min_pixels", "max_pixels") if by_area else ()

    @property
    def of_crops(self) -> "Preprocessing":
        """The same with the normalisation of crops."""
        return replace(self, mean=self.crop_mean or self.mean, std=self.crop_std or self.std)


class Place(StrEnum):
    """Where pictures are prepared, or files decoded."""

    DEVICE = "device"
    """By the engine, or by a decoder on its device."""
    CPU = "cpu"
    """By decoders on the CPU."""


class NotOnDevice(StrEnum):
    """Why a picture is prepared, or files are decoded, on the CPU."""

    ASKED = "asked"
    """By `--prepare cpu` or `--decode cpu`."""
    NO_DEVICE = "no_device"
    """The tower runs on the CPU."""
    UNVERIFIED = "unverified"
    """Test pictures could not be prepared or decoded on the device, or differed."""
    TOO_LARGE = "too_large"
    """The picture takes more memory than one may have on its way to the device, or is too long and narrow for it."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """Where pictures are prepared, or JPEG files or clips decoded, and why not on the device."""

    place: Place = Place.CPU
    reason: NotOnDevice | None = NotOnDevice.NO_DEVICE
    detail: str = ""
    """The finding, for `UNVERIFIED`."""


class Encoding(StrEnum):
    """Format of a file that items may carry instead of pixels."""

    JPEG = "jpeg"
    PNG = "png"
    WEBP = "webp"
    MP4 = "mp4"
    WEBM = "webm"
    GIF = "gif"
    BMP = "bmp"
    AVIF = "avif"
    TIFF = "tiff"
    ICO = "ico"
    JPEG2000 = "jpeg2000"
    AVI = "avi"
    MPEG_TS = "mpeg_ts"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that a request is checked against."""

    request_bytes: int
    items_per_request: int
    patches_per_item: int
    queued_items: int
    queued_bytes: int
    encoded_bytes: int = 0
    """Maximum bytes of a file; 0 if nothing is decoded."""
    encoded_pixels: int = 0
    """Maximum pixels of an image in a file, or of a frame of a clip."""
    cached_bytes: int = 0
    """Size of the embedding cache; 0 if nothing is cached."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The answer to `GetModel`."""

    model_id: str
    model_type: str
    fingerprint: str
    dtype: DType
    geometry: Geometry
    preprocessing: Mapping[Modality, Preprocessing]
    ladder: Ladder
    dropped: Mapping[int, str]
    """Why budgets have no graph, by their tokens."""
    limits: Limits
    graphs: str
    attention: str
    device: str
    version: str
    device_sharing: str = ""
    """How the device is shared with other processes, in a line; empty on a CPU."""
    nixl: bool = False
    """Whether rows can be written into clients' memory."""
    replica: str = field(default_factory=lambda: uuid4().hex)
    """Random name of this engine, by which clients count replicas."""
    encodings: tuple[Encoding, ...] = ()
    """Files that are decoded."""
    prepared: tuple[Modality, ...] = ()
    """Modalities whose pictures and files are prepared."""
    preparation: Preparation = field(default_factory=Preparation)
    """Where pictures are prepared."""
    decoding: Preparation = field(default_factory=Preparation)
    """Where JPEG files are decoded."""
    clip_decoding: Preparation = field(default_factory=Preparation)
    """Where clips are decoded."""
    preparation_fingerprint: str = ""
    """SHA-256 over all that decides how these are prepared, in hex."""
    backends: Mapping[Budget, str] = field(default_factory=dict)
    """The attention backend of each budget's longest segments."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Attention backends, graphs or fused blocks that do not run on this device, and why."""
    pooling: Pooling = Pooling.NONE
    poolings: tuple[Pooling, ...] = (Pooling.NONE,)
    matryoshka: tuple[int, ...] | None = None
    """Lengths that pooled vectors may be cut to, any if empty; None if they may not be cut."""
    clip_groups: bool = False
    """Whether the rows of each of the `t` groups of frames of a clip depend on those frames alone."""

    @property
    def options(self) -> tuple[str, ...]:
        """Options that images, and `frames` that files of clips, may have."""
        of_images = self.preprocessing[Modality.IMAGE].options if Modality.IMAGE in self.prepared else ()
        takes_clips = Modality.VIDEO in self.prepared and Encoding.MP4 in self.encodings
        return (*of_images, "frames") if takes_clips else of_images

    @property
    def rows_by_grid(self) -> tuple[Modality, ...]:
        """Modalities whose items have one embedding per grid token."""
        return tuple(
            modality
            for modality, own in self.preprocessing.items()
            if own.tiling is None and own.resizing is not Resizing.OTHER and not self.geometry.line_ends
        )
