"""Clips on a GPU: NVDEC's frames are those of the decoders on the CPU, and damage is noticed."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PyNvVideoCodec")
pytest.importorskip("av")

from encoded_files import clip, moving
from prepared import MODELS
from vitwire_children.serving import Fault, NotDone
from vitwire_server.core.items import Modality
from vitwire_server.preparing.device import films
from vitwire_server.preparing.device.hardware import take
from vitwire_server.preparing.device.sources import Nvdec
from vitwire_server.preparing.files import clips

RECIPE, PIXELS = MODELS["patches"][Modality.VIDEO], 1 << 24
TAKEN: dict[str, dict[str, Any]] = {
    "b-frames": {"options": {"bf": "3", "g": "9"}},
    "open groups": {"options": {"x264-params": "open-gop=1:keyint=9:bframes=3"}},
    "references": {"options": {"x264-params": "ref=8:bframes=8:b-pyramid=2:keyint=20"}},
    "refresh": {"options": {"x264-params": "intra-refresh=1:keyint=12"}},
    "full range": {"options": {"x264-params": "colormatrix=bt709:fullrange=on"}},
    "BT.2020": {"options": {"x264-params": "colormatrix=bt2020nc"}},
    "hevc": {"codec": "libx265", "options": {"x265-params": "log-level=none:keyint=10"}},
}


@pytest.fixture(scope="module")
def source() -> Nvdec:
    return Nvdec(take(torch.device("cuda", 0)))


def made_of(data: bytes, source: Nvdec) -> torch.Tensor:
    film = clips.measure(data, RECIPE, PIXELS).film
    if not film:
        raise NotDone(Fault.LOST, "it is not for the device")
    return films.frames_of(data, film, source, torch.device("cuda", 0))


@pytest.mark.parametrize("size", [(144, 194), (448, 640), (1080, 1920)])
@pytest.mark.parametrize("name", TAKEN)
def test_frames_are_those_of_the_cpu(source: Nvdec, name: str, size: tuple[int, int]) -> None:
    data = clip(moving(24, *size), **TAKEN[name])
    with clips.decoded(data, RECIPE, PIXELS) as (frames, _):
        wanted = np.stack(list(frames))
    for _ in range(2):  # the decoders of the first time are used again
        made = made_of(data, source)
        np.testing.assert_array_equal(made.cpu().numpy(), wanted)


@pytest.mark.parametrize("name", ["b-frames", "hevc"])
def test_damage_is_noticed(source: Nvdec, name: str) -> None:
    rng, whole = np.random.default_rng(0), clip(moving(24, 448, 640), **TAKEN[name])
    for _ in range(10):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), 12):
            data[at] = rng.integers(256)
        with pytest.raises((NotDone, ValueError, films.av.FFmpegError)):
            made_of(bytes(data), source)
