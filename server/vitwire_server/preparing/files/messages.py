"""Messages between a server process and its decoders. Bytes of files and pixels lie in memory that both share."""

from msgspec import Struct

from vitwire_server.core.items import Areas, Modality
from vitwire_server.preparing.rules.forms import Form
from vitwire_server.preparing.rules.patches import CHANNELS
from vitwire_server.preparing.rules.recipe import Recipe

MOST_FRAMES = 1 << 14
"""Frames of a clip: their times are sent to the server."""

# -- to a decoder ----------------------------------------------------------------------------------


class Sizes(Struct, frozen=True):
    """Bounds of a pool. The memory that it shares with a decoder begins with the input, and ends with the output."""

    input_bytes: int
    """Bytes of the largest file or picture."""
    output_bytes: int
    """Bytes of the largest prepared item."""
    pixels: int
    """Pixels of the largest picture in a file."""
    seconds: float
    """Processor time for the largest file."""
    memory: int
    """Bytes of each decoder, in addition to what it has after its imports."""


class Setup(Struct, frozen=True):
    """What the model needs."""

    recipes: dict[Modality, Recipe]
    sizes: Sizes
    clips: bool
    """True if files of clips are read, which needs PyAV."""


class Measure(Struct, frozen=True):
    """Answered with Measured: read the file's header only."""

    nbytes: int
    modality: Modality
    seconds: float
    """Processor time."""
    areas: Areas | None = None
    """Bounds in place of the recipe's."""
    frames: tuple[int, ...] = ()
    """Frames in place of the recipe's rule."""


class Film(Struct, array_like=True, frozen=True):
    """What the chosen frames of a clip are, for a decoder on a device."""

    times: tuple[int, ...]
    """When each is shown, in the stream's unit."""
    size: tuple[int, int]
    """Height and width, as they are stored."""
    rotation: tuple[bool, bool, bool]
    """The fields of `rotation.Rotation`."""
    colours: tuple[int, bool]
    """The fields of `colours.Colours`."""


class Decode(Struct, frozen=True):
    """Answered with Decoded: prepare a file or picture."""

    nbytes: int
    modality: Modality
    seconds: float
    """Processor time."""
    output_bytes: int
    """Bytes of the pixels and crops together."""
    picture: tuple[int, ...] | None = None
    """The shape of a picture, or of the frames of a clip; None for a file."""
    raw: bool = False
    """True to return the picture in RGB, for the engine to prepare."""
    orientation: int = 1
    """By EXIF, for a decoder on a device."""
    areas: Areas | None = None
    frames: tuple[int, ...] = ()
    """As in Measure."""
    film: Film | None = None
    """The chosen frames, if a decoder on a device gets a clip."""


# -- from a decoder --------------------------------------------------------------------------------


class Measured(Struct, array_like=True, frozen=True):
    """Form and cost of the prepared item."""

    grid: tuple[int, int, int]
    pixels: tuple[int, ...]
    crops: tuple[int, ...] | None
    cost: int
    """Pixels to decode and to write, which predict the time that it takes."""
    picture: tuple[int, ...] = ()
    """Shape of the decoded picture in RGB, `(H, W, 3)` or `(F, H, W, 3)`."""
    frame_seconds: tuple[float, ...] = ()
    """Times of a clip's used frames, by its mean rate; empty if it has none."""
    second_per_grid: float = 0.0
    """Seconds of a clip for each group of frames in the grid; 0 if it has no rate."""
    orientation: int = 0
    """By EXIF, of a JPEG that a device decodes as Pillow does; 0 of other files."""
    area: int = 0
    """Pixels of such a JPEG."""
    film: Film | None = None
    """Of a clip that a device decodes as PyAV does."""

    @classmethod
    def of(cls, form: Form, cost: int, picture: tuple[int, ...]) -> "Measured":
        """`cost` is of decoding, in pixels; `picture` has the shape of the decoded picture or frames."""
        return cls(form.grid, form.pixels, form.crops, cost + form.area, (*picture[:-1], CHANNELS))


class Decoded(Struct, array_like=True, frozen=True):
    """The pixels are in the shared memory, and the crops behind them."""

    decode_seconds: float
    prepare_seconds: float
    """0 for a picture that the engine prepares."""
