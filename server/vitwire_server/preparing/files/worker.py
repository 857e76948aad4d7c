"""A decoder: a process that prepares one file or picture after the other. Does not import torch.

It ends with the process that started it. Memory and processor time are limited by the kernel, as files are untrusted
and the libraries that read them are in C.
"""

import mmap
import sys
import time
from collections.abc import Iterable
from types import ModuleType

import msgspec
import numpy as np
from PIL import Image

from vitwire_children.serving import Fault, NotDone, serve
from vitwire_server.core.items import Modality
from vitwire_server.preparing import pillow
from vitwire_server.preparing.files import images
from vitwire_server.preparing.files.messages import MOST_FRAMES, Decode, Decoded, Measure, Measured, Setup
from vitwire_server.preparing.rules.patches import Pixels
from vitwire_server.preparing.rules.recipe import Recipe

_MAX_REASON = 200


def shared_memory() -> mmap.mmap:
    """The memory of a decoder, once it was set up; the second argument of its process is the descriptor."""
    return mmap.mmap(int(sys.argv[2]), 0)


class _Worker:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._memory = shared_memory()
        self._clips: ModuleType | None = None
        if setup.clips:
            from vitwire_server.preparing.files import clips  # noqa: PLC0415 - needs PyAV, which is optional

            self._clips = clips
        Image.MAX_IMAGE_PIXELS = setup.sizes.pixels

    def answer(self, job: Measure | Decode) -> object:
        """Measured or Decoded, as JSON. Raises NotDone or MemoryError."""
        try:
            return msgspec.to_builtins(self._measured(job) if isinstance(job, Measure) else self._decoded(job))
        except (NotDone, MemoryError):
            raise
        except Image.DecompressionBombError:
            raise NotDone(Fault.TOO_LARGE, images.too_large(self._setup.sizes.pixels)) from None
        except Exception as error:  # noqa: BLE001 - libraries raise anything over broken files
            raise NotDone(Fault.MALFORMED, f"cannot be decoded: {_brief(error)}") from None

    def _measured(self, job: Measure) -> Measured:
        reader = images if job.modality is Modality.IMAGE else self._clip_reader
        measured: Measured = reader.measure(self._memory[: job.nbytes], self._recipe(job), self._setup.sizes.pixels)
        if len(measured.frame_seconds) > MOST_FRAMES:
            raise NotDone(Fault.TOO_LARGE, "the model's rule chooses too many frames of it")
        return measured

    def _decoded(self, job: Decode) -> Decoded:
        recipe, data = self._recipe(job), self._memory
        start = time.perf_counter()
        if job.picture:
            picture: pillow.AnyPicture = np.frombuffer(data, np.uint8, job.nbytes).reshape(job.picture)
        elif job.modality is Modality.IMAGE:
            picture = images.decode(data[: job.nbytes], recipe)
        else:
            reading = self._clip_reader.decoded(data[: job.nbytes], recipe, self._setup.sizes.pixels)
            with reading as (frames, count):  # decoding and preparing alternate
                self._write(frames if job.raw else _parts(pillow.clip(frames, count, recipe)), job)
            return Decoded(time.perf_counter() - start, 0.0)
        decoded = time.perf_counter()
        if job.raw:
            self._write([pillow.flattened(np.asarray(picture), recipe)], job)
            return Decoded(time.perf_counter() - start, 0.0)
        made = pillow.prepared(picture, recipe) if isinstance(picture, np.ndarray) else pillow.image(picture, recipe)
        self._write(_parts(made), job)
        return Decoded(decoded - start, time.perf_counter() - decoded)

    def _recipe(self, job: Measure | Decode) -> Recipe:
        if job.modality not in self._setup.recipes:
            raise NotDone(Fault.UNSUPPORTED, f"is one of the {job.modality}s, which this model takes as pixels only")
        return self._setup.recipes[job.modality].within(job.areas).taking(job.frames)

    @property
    def _clip_reader(self) -> ModuleType:
        if self._clips is None:
            raise NotDone(Fault.UNSUPPORTED, "is a clip, and this server decodes images only")
        return self._clips

    def _write(self, parts: Iterable[Pixels], job: Decode) -> None:
        """Write arrays one after the other; together they must have the job's bytes."""
        at, end = self._setup.sizes.input_bytes, self._setup.sizes.input_bytes + job.output_bytes
        for part in parts:
            if at + part.size <= end:
                np.frombuffer(self._memory, np.uint8, part.size, at).reshape(part.shape)[:] = part
            at += part.size
        if at != end:
            raise NotDone(Fault.MALFORMED, "its header and its content differ in size")


def _parts(tiles: pillow.Tiles) -> list[Pixels]:
    return [tiles.pixels] if tiles.crops is None else [tiles.pixels, tiles.crops]


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."


if __name__ == "__main__":
    serve(lambda: lambda setup: (_Worker(setup).answer, setup.sizes.memory))
