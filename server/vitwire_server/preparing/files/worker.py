"""A decoder: a process that prepares one file or picture after the other. Does not import torch.

It ends with the process that started it. Memory and processor time are limited by the kernel, as files are untrusted
and the libraries that read them are in C.
"""

import mmap
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import NoReturn, TypeAlias

import numpy as np
from msgspec import msgpack
from PIL import Image, UnidentifiedImageError

from vitwire_children.confine import May, confined, dies_with
from vitwire_server.core.decoding import Fault
from vitwire_server.core.items import Modality
from vitwire_server.preparing import pillow
from vitwire_server.preparing.files import images
from vitwire_server.preparing.files.messages import (
    MAX_MESSAGE,
    TO_DECODER,
    Decode,
    Decoded,
    FromDecoder,
    Measure,
    Measured,
    NotDecoded,
    Ready,
    Refused,
    Setup,
)
from vitwire_server.preparing.rules.patches import Pixels
from vitwire_server.preparing.rules.recipe import Recipe

_MAX_REASON = 200
_TOO_MANY_FRAMES = Refused(Fault.TOO_LARGE, "the model's rule chooses too many frames of it")
"""Instead of an answer with more times than a message can carry."""


Answering: TypeAlias = Callable[[Setup, mmap.mmap], Callable[[Measure | Decode], FromDecoder]]
"""Gets the setup and the memory, and returns what answers a job."""


def serve(ahead: Callable[[], Answering], may: May = May.COMPUTE) -> NoReturn:
    """Answer jobs until the socket is closed; arguments of the process are the descriptors of socket and memory.

    `ahead` is called before the setup is awaited, and does all that needs none. The process is confined before the
    first job: whatever jobs use must have been imported and opened.
    """
    end, memory, parent = (int(each) for each in sys.argv[1:4])
    dies_with(parent)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the parent decides when to stop
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=end) as link:
        made = ahead()
        setup = TO_DECODER.decode(link.recv(MAX_MESSAGE))
        assert isinstance(setup, Setup), "the first message"
        answer = made(setup, mmap.mmap(memory, 0))
        os.dup2(1, 2)  # to /dev/null: what was taken over must not write, or fill, the server's log
        link.sendall(msgpack.encode(Ready(confined(parent, may, setup.sizes.memory if may is May.COMPUTE else None))))
        while raw := link.recv(MAX_MESSAGE):
            job = TO_DECODER.decode(raw)
            assert isinstance(job, Measure | Decode)
            raw = msgpack.encode(answer(job))
            link.sendall(raw if len(raw) <= MAX_MESSAGE else msgpack.encode(_TOO_MANY_FRAMES))
    os._exit(0)


class _Worker:
    def __init__(self, setup: Setup, memory: mmap.mmap) -> None:
        self._setup = setup
        self._memory = memory
        self._clips: ModuleType | None = None
        if setup.clips:
            from vitwire_server.preparing.files import clips  # noqa: PLC0415 - needs PyAV, which is optional

            self._clips = clips
        Image.MAX_IMAGE_PIXELS = setup.sizes.pixels
        warnings.simplefilter("ignore")  # files are untrusted: their oddities are not news

    def answer(self, job: Measure | Decode) -> FromDecoder:
        """The answer to a job. The kernel ends the process if it takes too long."""
        signal.setitimer(signal.ITIMER_PROF, job.seconds)
        try:
            return self._measured(job) if isinstance(job, Measure) else self._decoded(job)
        except NotDecoded as error:
            return Refused(error.fault, str(error))
        except MemoryError:
            return Refused(Fault.TOO_LARGE, "needs more memory than a decoder may use")
        except UnidentifiedImageError:
            return Refused(Fault.UNSUPPORTED, "is not a JPEG, PNG, WebP, GIF or BMP image")
        except Image.DecompressionBombError as error:
            return Refused(Fault.TOO_LARGE, str(error))
        except Exception as error:  # noqa: BLE001 - libraries raise anything over broken files
            return Refused(Fault.MALFORMED, f"cannot be decoded: {_brief(error)}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _measured(self, job: Measure) -> Measured:
        reader = images if job.modality is Modality.IMAGE else self._clip_reader
        measured: Measured = reader.measure(
            self._memory[: job.nbytes], self._recipe(job.modality), self._setup.sizes.pixels
        )
        return measured

    def _decoded(self, job: Decode) -> Decoded:
        recipe, data = self._recipe(job.modality), self._memory
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

    def _recipe(self, modality: Modality) -> Recipe:
        if modality not in self._setup.recipes:
            raise NotDecoded(Fault.UNSUPPORTED, f"is one of the {modality}s, which this model takes as pixels only")
        return self._setup.recipes[modality]

    @property
    def _clip_reader(self) -> ModuleType:
        if self._clips is None:
            raise NotDecoded(Fault.UNSUPPORTED, "is a clip, and this server decodes images only")
        return self._clips

    def _write(self, parts: Iterable[Pixels], job: Decode) -> None:
        """Write arrays one after the other; together they must have the job's bytes."""
        at, end = self._setup.sizes.input_bytes, self._setup.sizes.input_bytes + job.output_bytes
        for part in parts:
            if at + part.size <= end:
                np.frombuffer(self._memory, np.uint8, part.size, at).reshape(part.shape)[:] = part
            at += part.size
        if at != end:
            raise NotDecoded(Fault.MALFORMED, "its header and its content differ in size")


def _parts(tiles: pillow.Tiles) -> list[Pixels]:
    return [tiles.pixels] if tiles.crops is None else [tiles.pixels, tiles.crops]


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."


if __name__ == "__main__":
    serve(lambda: lambda setup, memory: _Worker(setup, memory).answer)
