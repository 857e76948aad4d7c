"""What the hooked front end makes of clips: vLLM's own prompts, times and places, and the frames that vLLM chooses."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.engines.vllm.conftest import SERVER_FLAGS
from tests.engines.vllm.engine import vllm_config
from tests.engines.vllm.image_site import picture, video
from tests.engines.vllm.in_process import WithTower
from tests.engines.vllm.test_plugin_inputs import LIMITS, Json, counted, engines, hooked, part, queued, rendered, since
from vllm.v1.engine.input_processor import InputProcessor

from servers import ServerProcess, serving
from vitwire import Client, Item
from vitwire.integrations.vllm import uploads
from vitwire.integrations.vllm.files import CLIPS
from vitwire.integrations.vllm.table import FILE, OPTIONS, unpacked

__all__ = ["engines", "hooked"]
VIDEOS = LIMITS | {"limit_mm_per_prompt": {"image": 10, "video": 10}, "mm_processor_cache_gb": 0}
TIMES = {"qwen2_5_vl": "second_per_grid_ts", "qwen3_vl": "timestamps", "qwen3_5": "timestamps"}
"""What positions or prompts are made from, beside the grid."""
MEDIA_IO_KWARGS: list[Json] = [
    *({}, {"fps": 5}, {"fps": 0.5}, {"fps": 60}, {"num_frames": 8}),
    *({"video_backend": each, "num_frames": 7, "fps": 3, "max_duration": 2} for each in ("opencv", "opencv_dynamic")),
]


def loaded(frontend: InputProcessor, file: bytes, options: Json) -> Json:
    """The prompt of a clip; nearly empty if vLLM refuses it."""
    try:
        return rendered(frontend, [video(file)], media_io_kwargs={"video": options})
    except (ValueError, ZeroDivisionError):
        return {"mm_kwargs": {"video": ()}}


@pytest.fixture
def outcomes() -> Callable[[], dict[str, int]]:
    """Clips since the test began, by outcome."""
    before = counted(CLIPS)
    return lambda: since(before, CLIPS)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_prompts_are_those_of_the_tower(
    kind: str,
    engines: Callable[..., WithTower],
    checkpoints: dict[str, Path],
    clips: dict[str, bytes],
    outcomes: Callable[[], dict[str, int]],
) -> None:
    """Token ids with the times of frames, places, grids, of clips alone and among images; rows are the server's."""
    tower = InputProcessor(vllm_config(checkpoints[kind], "localhost:1", **VIDEOS, ec_transfer_config=None))
    with serving(checkpoints[kind], *SERVER_FLAGS) as server, Client(server.target) as client:
        vllm = engines(server.target, kind, **VIDEOS)
        files = [clips[name] for name in ("usual", "turned", "every frame", "NTSC, VP9", "odd")]
        several = [part(picture(64, 64)), video(files[1]), part(picture(90, 40)), video(files[0])]
        name = vllm.add([*map(video, files), *several])
        vllm.run(name)
        assert not vllm.errors
        assert vllm.encoded == []
        rows = client.encode([Item(encoded=file, modality="video") for file in files])
        for gathered, row in zip(vllm.gathered[name], rows, strict=False):
            assert torch.equal(gathered, row.torch())
        for parts in (*([video(file)] for file in files), several):
            ours, theirs = rendered(vllm.frontend, parts), rendered(tower, parts)
            for field in ("prompt_token_ids", "mm_placeholders"):
                assert ours[field] == theirs[field], field
            for one, other in zip(ours["mm_kwargs"]["video"], theirs["mm_kwargs"]["video"], strict=True):
                assert torch.equal(one["video_grid_thw"].data, other["video_grid_thw"].data)
                assert kind not in TIMES or one[TIMES[kind]].data == other[TIMES[kind]].data
                assert "pixel_values_videos" not in one
            assert not set(ours["mm_hashes"]["video"]) & set(theirs["mm_hashes"]["video"])
        assert outcomes() == {"accepted": 2 * len(files) + 4}


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_frames_are_those_that_vllm_reads(
    kind: str, engines: Callable[..., WithTower], checkpoints: dict[str, Path], clips: dict[str, bytes]
) -> None:
    """By prompts, times and pixels, over rates, edit lists, B-frames, counts and loaders; ids differ with frames."""
    settings = VIDEOS | {"ec_transfer_config": None, "mm_device_do_normalize": False}
    tower = InputProcessor(vllm_config(checkpoints[kind], "localhost:1", **settings))
    left, ids = set[str](), dict[tuple[str, object], str]()
    with serving(checkpoints[kind], *SERVER_FLAGS) as server, Client(server.target) as client:
        frontend = engines(server.target, kind, **VIDEOS).frontend
        for options, (clip, file) in product(MEDIA_IO_KWARGS, clips.items()):
            case = f"{clip}, {options}"
            ours, theirs = (loaded(each, file, options) for each in (frontend, tower))
            assert "mm_hashes" in ours or "in all" in clip, case
            for field in ("prompt_token_ids", "mm_placeholders"):
                assert ours.get(field) == theirs.get(field), case
            for one, other in zip(ours["mm_kwargs"]["video"], theirs["mm_kwargs"]["video"], strict=True):
                assert one[TIMES[kind]].data == other[TIMES[kind]].data, case
                if FILE not in one:
                    left.add(clip)
                    continue
                sent, (name,) = unpacked(one[OPTIONS].data.tolist()), ours["mm_hashes"]["video"]
                assert ids.setdefault((clip, sent), name) == name, case
                pixels, grid = other["pixel_values_videos"].data, tuple(other["video_grid_thw"].data.tolist())
                items = [Item(encoded=file, modality="video", options=sent), Item(pixels.float(), grid, "video")]
                rows = (each.torch().float() for each in client.encode(items))
                assert torch.cosine_similarity(*rows).min() > 0.99, case
    assert left == {"one is hidden", "mirrored"}
    assert len(set(ids.values())) == len(ids) > 5 * len(MEDIA_IO_KWARGS)


def test_what_vllm_decodes_itself(
    engines: Callable[..., WithTower],
    server: ServerProcess,
    clips: dict[str, bytes],
    outcomes: Callable[[], dict[str, int]],
) -> None:
    """Options that the encoder lacks leave a clip to vLLM, among clips that it takes; vLLM refuses broken ones."""
    vllm = engines(server.target, **VIDEOS)
    usual, odd = video(clips["usual"]), video(clips["odd"])
    rendered(vllm.frontend, [usual, odd], mm_processor_kwargs={"fps": 1.0})
    rendered(vllm.frontend, [odd], media_io_kwargs={"video": {"frame_recovery": True}})
    rendered(vllm.frontend, [video(clips["mirrored"])])  # OpenCV turns it by 180 degrees
    assert outcomes() == {"options": 3, "refused": 1}
    with pytest.raises(ValueError, match="video"):
        rendered(vllm.frontend, [usual, video(clips["odd"][:500])])
    assert outcomes() == {"options": 3, "refused": 1}


def test_a_large_file_does_not_travel_to_the_workers(
    engines: Callable[..., WithTower], server: ServerProcess, clips: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it sent again."""
    monkeypatch.setattr(uploads, "_RESENT_BYTES", len(clips["usual"]))
    vllm = engines(server.target, **VIDEOS)
    prompt = rendered(vllm.frontend, [video(clips["usual"]), video(clips["odd"])])
    sizes = [each[FILE].data.numel() for each in prompt["mm_kwargs"]["video"]]
    assert sizes == [len(clips["usual"]), 0]
    name = queued(vllm, prompt)
    vllm.run(name)
    assert not vllm.errors
    assert len(vllm.gathered[name]) > 1
