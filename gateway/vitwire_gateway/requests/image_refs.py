"""Places of images and clips in a request. Pure functions."""

from collections.abc import Iterator
from typing import NamedTuple

from vitwire.items import Modality
from vitwire_gateway.api_errors import invalid
from vitwire_gateway.bodies import Json

Path = tuple[str | int, ...]
"""Keys and indices that lead to a value in a request."""

IMAGE_TYPES = ("image_url", "input_image")
_INNER = ("content", "output", "source")
"""Fields of parts that may have parts in them."""
_DEEPEST = 16
"""Keys on the way to a part; no engine reads deeper ones."""
_OPTIONS = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields of a request by which engines prepare its images and clips."""
_CLIP_OPTIONS = (*_OPTIONS, "video_config", "use_audio_in_video")
_NOT_OF_IMAGES = {"audio", "audio_kwargs", "fps", "num_frames", "use_audio_in_video", "video", "videos_kwargs"}


class ImageRef(NamedTuple):
    """An image or clip in a request."""

    path: Path
    """To the field of its part that has it."""
    url: str
    is_base64: bool = False
    """The URL is the file itself, in base64."""

    @property
    def param(self) -> str:
        """Its name in errors."""
        return param_of(self.path)

    @property
    def modality(self) -> Modality:
        """A clip's field is `video_url`."""
        return "video" if self.path[-1] == "video_url" else "image"


def param_of(path: Path) -> str:
    """The name of a field in errors, such as `messages[1].content[2].image_url`."""
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path)[1:]


def image_parts(value: object, path: Path) -> Iterator[tuple[Path, Json]]:
    """All parts in a value that are images by their type or fields, in order, with their paths."""
    waiting = [(path, value)]
    while waiting:
        path, value = waiting.pop()
        inner: list[tuple[str | int, object]] = []
        if isinstance(value, list):
            inner = list(enumerate(value))
        elif isinstance(value, dict):
            if value.get("type") in (*IMAGE_TYPES, "image") or "image_url" in value:
                yield path, value
                continue
            inner = [(name, value[name]) for name in _INNER if name in value]
        if len(path) < _DEEPEST:
            waiting += (((*path, key), each) for key, each in reversed(inner) if isinstance(each, dict | list))


def check_options(request: Json, source: object, ref: ImageRef) -> None:
    """Raises ApiError if an image or clip has options, which would have no effect on its embedding."""
    is_clip = ref.modality == "video"
    others, known = (set[str](), ("url",)) if is_clip else (_NOT_OF_IMAGES, ("url", "detail"))
    options = {name: request.get(name) for name in (_CLIP_OPTIONS if is_clip else _OPTIONS)}
    given = [
        name for name, value in options.items() if value and not (isinstance(value, dict) and value.keys() <= others)
    ]
    if isinstance(source, dict):
        given += [f"{ref.param}.{name[:32]}" for name, value in source.items() if name not in known and value]
    if given:
        what = "clips" if is_clip else "images"
        text = f"it has no effect on {what} that the encoder prepares, by the rule of its model; leave it out"
        raise invalid(text, given[0], "unsupported_option")


def url_of(source: object, path: Path) -> str:
    """The URL of an image or clip, given as a string or as an object with `url`. Raises ApiError."""
    url = source.get("url") if isinstance(source, dict) else source
    if isinstance(url, str) and url:
        return url
    kind = "video" if path[-1] == "video_url" else "image"
    code = "invalid_clip_url" if kind == "video" else "invalid_image_url"
    if isinstance(source, dict):
        raise invalid("expected a string in the field url", f"{param_of(path)}.url", code)
    got = "nothing" if source is None else type(source).__name__
    raise invalid(f'expected {{"url": "data:{kind}/..."}}, got {got}', param_of(path), code)
