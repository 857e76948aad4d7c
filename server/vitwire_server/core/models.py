"""What is told about the model that a server holds."""

from collections.abc import Mapping
from dataclasses import dataclass

from vitwire_server.core.budgets import Ladder
from vitwire_server.core.items import DType, Modality


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a tower that clients, codec and planner need to know."""

    patch: int
    merge: int
    temporal: int
    channels: int
    width: int
    """Columns of a row, deepstack included."""
    levels: int
    """Deepstack levels: a row is `[main | level 0 | level 1 | ...]`."""

    def columns(self, *, frames: int) -> int:
        """Columns of a pixel row that holds `frames` frames."""
        return self.channels * frames * self.patch * self.patch


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How pixels of one modality are prepared: `(pixel * rescale_factor - mean) / std` per channel."""

    min_pixels: int
    max_pixels: int
    """Area bounds of the resized image; of a whole clip if `bounds_span_frames`."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float
    resample: int
    """Pillow's number of the filter."""
    bounds_span_frames: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that a request is checked against."""

    request_bytes: int
    items_per_request: int
    patches_per_item: int
    queued_items: int
    queued_bytes: int


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
    """Why budgets of so many tokens have no graph."""
    limits: Limits
    graphs: str
    attention: str
    device: str
    version: str
