"""A decoder of JPEG files on the model's device: nvImageCodec decodes, the kernel of `device` prepares.

It is a process with a separate context on the device: what a file does to NVIDIA's libraries ends this process. On a
GPU the files are decoded by the engines for JPEG, whose pixels differ from libjpeg-turbo's by at most 1; on a CPU by
libjpeg-turbo, which shows that the way works.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from itertools import cycle
from mmap import mmap
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from types import ModuleType
from typing import Any

import numpy as np
import torch
from msgspec import to_builtins
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitwire_children.confine import May
from vitwire_children.serving import Answering, Fault, NotDone, serve
from vitwire_server.core.decoding import MAX_PICTURE_PIXELS
from vitwire_server.core.models import Preprocessing
from vitwire_server.preparing.device.resizing import prepared
from vitwire_server.preparing.files.messages import Decode, Decoded, Setup
from vitwire_server.preparing.files.worker import shared_memory
from vitwire_server.preparing.rules.recipe import Recipe

_MOST_DIFFERENCE, _MOST_DIFFERING = 1, 1e-3
"""From Pillow, and the share of values that differ at all: 1 and 0.00014 were measured."""
_SAMPLINGS = ("4:4:4", "4:2:2", "4:2:0")
_PROBE = (333, 517)
DRAWN = Recipe(Preprocessing(1, 1 << 16, (0.5,) * 3, (0.5,) * 3, 1 / 255, Image.Resampling.BICUBIC), 16, 2, 1)
"""Shrinks the probe along both axes."""
_EXTENSIONS = ("libnvjpeg_ext.*", "libjpeg_turbo_ext.*")
_NO_MPS = "/nonexistent"
"""A fault under MPS ends the contexts of all its clients, such as the engine's: files are decoded outside of it."""
_BLOCKING = 4
"""CU_CTX_SCHED_BLOCKING_SYNC: waits do not use a core."""
_TURNS = {2: (0, True), 3: (2, False), 4: (2, True), 5: (1, True), 6: (3, False), 7: (3, True), 8: (1, False)}
"""Quarter turns to the left, and whether the picture is mirrored before, by the orientation of EXIF."""


class Hardware:
    """Decodes one file after the other."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self.max_pixels = MAX_PICTURE_PIXELS
        on_device = self._device.type == "cuda"
        if on_device:
            index = take(self._device)
        nvimgcodec = _library()
        kinds = nvimgcodec.BackendKind
        self._decoder = nvimgcodec.Decoder(
            device_id=index if on_device else nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
            max_num_cpu_threads=1,
            backends=[nvimgcodec.Backend(kinds.HW_GPU_ONLY if on_device else kinds.CPU_ONLY)],
            options=":fancy_upsampling=1",
        )
        self._parameters = nvimgcodec.DecodeParams(
            apply_exif_orientation=False, sample_format=nvimgcodec.SampleFormat.I_RGB
        )
        self._stream = nvimgcodec.CodeStream
        self._image: Any = None
        """Memory that is used again; all zeros between two files, so that a damaged one shows nothing of another."""

    def decoded(self, data: bytes, orientation: int) -> Tensor:
        """The picture in RGB, `(H, W, 3)` uint8 on the device, turned upright. Raises NotDone."""
        again = {"image": self._image} if self._image is not None else {}
        try:
            stream = self._stream(data)
            area = stream.height * stream.width  # it reads the header here
        except RuntimeError as error:
            raise NotDone(Fault.LOST, str(error)) from error
        if area > self.max_pixels:
            raise NotDone(Fault.LOST, "nvImageCodec finds a larger picture in it than Pillow")
        image = self._decoder.decode(stream, params=self._parameters, **again)
        if image is None:
            self._image = None  # it may be half written
            raise NotDone(Fault.LOST, "the device does not decode this file")
        self._image = image
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # kernels that wait for the engines for JPEG would keep the device from others
        held = self._pixels()
        picture = upright(held, orientation).clone(memory_format=torch.contiguous_format)
        held.zero_()
        return picture

    def _pixels(self) -> Tensor:
        if self._device.type == "cuda":
            return torch.as_tensor(self._image, device=self._device)
        return torch.from_numpy(np.asarray(self._image))


def take(device: torch.device) -> int:
    """Make a context on the device, outside of MPS, for this process. Returns the device's index."""
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = _NO_MPS
    index = device.index or 0
    ctypes.CDLL("libcuda.so.1").cuInit(0)
    ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxSetFlags_v2(index, _BLOCKING)
    torch.cuda.set_device(index)
    return index


def _library() -> ModuleType:
    """nvImageCodec with its extensions for JPEG alone. Raises ImportError."""
    found = find_spec("nvidia") and find_spec("nvidia.nvimgcodec")
    if found is None or found.origin is None:
        raise ImportError("nvidia-nvimgcodec is not installed: install the extra jpeg")
    package, folder = Path(found.origin).parent, Path(mkdtemp(prefix="vitwire-jpeg-"))
    for library in package.parent.glob("*/lib/libnvjpeg.so*"):
        ctypes.CDLL(str(library))  # the extension finds it in its folder otherwise, and not from another folder
    for pattern in _EXTENSIONS:
        for library in (package / "extensions").glob(pattern):
            (folder / library.name).symlink_to(library)
    os.environ["NVIMGCODEC_EXTENSIONS_PATH"] = str(folder)
    try:
        return import_module("nvidia.nvimgcodec")
    finally:
        rmtree(folder)


def upright(picture: Tensor, orientation: int) -> Tensor:
    """A view of `(H, W, 3)` that is turned as EXIF says; the orientations are 1 to 8."""
    quarters, mirrored = _TURNS.get(orientation, (0, False))
    return torch.rot90(picture.flip(1) if mirrored else picture, quarters, (0, 1))


def fault_of(hardware: Hardware) -> str:
    """Why files are not decoded by it; empty if drawn pictures are close enough to Pillow's."""
    for sampling in (*_SAMPLINGS, ""):
        data = _file(sampling)
        expected = np.asarray(Image.open(BytesIO(data)).convert("RGB")).astype(np.int16)
        try:
            made = hardware.decoded(data, 1).cpu().numpy()
        except (NotDone, RuntimeError) as error:
            return f"{sampling or 'grey'}: {error}"
        if made.shape != expected.shape:
            return f"{sampling or 'grey'} has the shape {made.shape}, not {expected.shape}"
        if fault := difference_of(np.abs(made - expected), "Pillow"):
            return f"{sampling or 'grey'} {fault}"
    return ""


def difference_of(differences: NDArray[np.int16], reference: str) -> str:
    """What is wrong with these differences; empty if they are small and few."""
    most, share = differences.max(), (differences > 0).mean()
    if most > _MOST_DIFFERENCE or share > _MOST_DIFFERING:
        return f"differs from {reference} by up to {most}, on {share:.2%} of the values"
    return ""


def _file(sampling: str) -> bytes:
    """A drawn picture with smooth and noisy parts; grey without a sampling."""
    rng, (height, width) = np.random.default_rng(0), _PROBE
    coarse = Image.fromarray(rng.integers(0, 256, (height // 16, width // 16, 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    picture = Image.fromarray((smooth + rng.integers(-6, 7, smooth.shape)).clip(0, 255).astype(np.uint8))
    file = BytesIO()
    if sampling:
        picture.save(file, "JPEG", quality=90, subsampling=sampling)
    else:
        picture.convert("L").save(file, "JPEG", quality=90)
    return file.getvalue()


def _ahead() -> Answering:
    """Decodes and prepares drawn pictures: the first use loads libraries and kernels, which is not possible later."""
    hardware = Hardware(sys.argv[3])
    for orientation, sampling in zip((1, *_TURNS), cycle((*_SAMPLINGS, ""))):
        prepared(hardware.decoded(_file(sampling), orientation), DRAWN)[0].cpu()
    return partial(_answering, hardware)


def _answering(hardware: Hardware, setup: Setup) -> tuple[Callable[[Decode], object], None]:
    """Does jobs. Whatever is not expected ends the process, and with it all that the file left behind."""
    hardware.max_pixels = setup.sizes.pixels
    memory = shared_memory()

    def answer(job: Decode) -> object:
        start = time.perf_counter()
        try:
            picture = hardware.decoded(memory[: job.nbytes], job.orientation)
            decoded = time.perf_counter()
            made = prepared(picture, setup.recipes[job.modality].within(job.areas))
            write(made, memory, setup.sizes.input_bytes, job)
        except ValueError as error:
            raise NotDone(Fault.LOST, str(error)) from error
        return to_builtins(Decoded(decoded - start, time.perf_counter() - decoded))

    return answer, None


def write(made: Iterable[Tensor | None], memory: mmap, at: int, job: Decode) -> None:
    """Bring rows into the memory from a place on. Raises ValueError unless they have as many bytes as the job says."""
    end = at + job.output_bytes
    for rows in made:
        if rows is not None and at + rows.numel() <= end:
            torch.frombuffer(memory, dtype=torch.uint8, count=rows.numel(), offset=at).copy_(rows.view(-1))
        at += rows.numel() if rows is not None else 0
    if at != end:
        raise ValueError("its header and its content differ in size")


def _check() -> Answering:
    """Its job is to say why this device cannot decode; empty if it can."""
    try:
        hardware = Hardware(sys.argv[3])
        hardware.decoded(_file("4:2:0"), 1)
    except Exception as error:  # noqa: BLE001 - of a driver or library: the reason is the answer
        fault = f"nvImageCodec cannot be used: {str(error).partition(chr(10))[0]}"
        return lambda _: (lambda _: fault, None)
    return lambda _: (lambda _: fault_of(hardware), None)


if __name__ == "__main__":
    serve(_check if sys.argv[2] == "check" else _ahead, may=May.USE_DEVICE)
