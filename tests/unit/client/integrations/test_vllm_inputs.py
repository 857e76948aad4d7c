"""Inputs of vLLM, without vLLM; tests/engines/vllm has its own parsers read them."""

import io
import zipfile
from base64 import b64decode
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fake_service import model_message
from vitwire import Embedding, Model, Report
from vitwire.integrations.vllm import image_embeds, image_part, reference_part, video_part
from vitwire.integrations.vllm.parts import unencoded_video_part
from vitwire.integrations.vllm.tensors import TorchFile, torch_base64

MODEL = Model.from_message(model_message())  # Qwen3-VL, 12 wide with 2 deepstack levels, merge size 2
INTERNVL = replace(MODEL, model_type="internvl_chat", deepstack_levels=0)


def embedding(grid: tuple[int, int, int] = (1, 4, 4), rows: int = 4, width: int = 12, **report: Any) -> Embedding:
    stored = np.arange(rows * width, dtype="<u2").reshape(rows, width)
    return Embedding(stored, "bfloat16", 2, Report(**report), grid)


def loaded(text: str) -> torch.Tensor:
    """As vLLM decodes it."""
    tensor = torch.load(io.BytesIO(b64decode(text, validate=True)), weights_only=True)
    assert isinstance(tensor, torch.Tensor)
    return tensor


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("float64", torch.float64), ("float32", torch.float32), ("float16", torch.float16), ("int64", torch.int64)],
)
@pytest.mark.parametrize("shape", [(3,), (2, 5), (0, 4)])
def test_files_of_torch(dtype: str, kind: torch.dtype, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    tensor = loaded(torch_base64(array, dtype))
    assert tensor.dtype == kind
    assert np.array_equal(tensor.numpy(), array)


def test_files_of_bfloat16_and_of_views() -> None:
    array = np.arange(24, dtype="<u2").reshape(4, 6)[:, ::2]
    tensor = loaded(torch_base64(array, "bfloat16"))
    assert tensor.dtype == torch.bfloat16
    assert np.array_equal(tensor.view(torch.uint16).numpy(), array)


def test_image_part() -> None:
    part = image_part(embedding(), MODEL, uuid="cat")
    assert (part["type"], part["uuid"]) == ("image_embeds", "cat")
    assert torch.equal(loaded(part["image_embeds"]["image_embeds"]), embedding().torch())
    assert loaded(part["image_embeds"]["image_grid_thw"]).tolist() == [1, 4, 4]
    assert "uuid" not in image_part(embedding(), MODEL)
    assert torch.equal(loaded(image_part(embedding(), INTERNVL)["image_embeds"]), embedding().torch())


def test_reference_part() -> None:
    assert reference_part((1, 4, 4), MODEL, "cat") == {
        "type": "image_embeds",
        "image_embeds": {"image_grid_thw": [1, 4, 4]},
        "uuid": "cat",
    }
    assert reference_part((2, 4, 4), MODEL, "clip", modality="video", timestamps=[0.5, 1.5])["video_embeds"] == {
        "video_grid_thw": [2, 4, 4],
        "timestamps": [0.5, 1.5],
    }


def test_the_times_of_a_file_are_the_middles_of_its_groups_of_frames() -> None:
    """And exact, as vLLM rounds them for the prompt: 1.45 in float32 would become 1.5 there, and 1.4 in float64."""
    seconds = (0.0, 0.6, 1.2, 1.7, 2.3)
    assert MODEL.group_seconds(seconds) == [0.3, 1.45, 2.3]
    assert MODEL.group_seconds(()) == []
    clip = embedding((3, 4, 4), 12, frame_seconds=seconds)
    for each in (video_part(clip, MODEL), video_part(clip, MODEL, timestamps=[0.3, 1.45, 2.3])):
        assert loaded(each["video_embeds"]["timestamps"]).tolist() == [0.3, 1.45, 2.3]
    (times,) = image_embeds([clip], MODEL, modality="video")["video"]["timestamps"]
    assert times.tolist() == [0.3, 1.45, 2.3]
    given = image_embeds([clip], MODEL, modality="video", timestamps=[[1, 2, 3]])["video"]["timestamps"]
    assert given[0].tolist() == [1, 2, 3]
    late = unencoded_video_part(clip, MODEL, uuid="u")["video_embeds"]["video_embeds"]
    assert b"".join(late).decode() == video_part(clip, MODEL)["video_embeds"]["video_embeds"]


QWEN2_5 = replace(MODEL, model_type="qwen2_5_vl")


def test_positions_of_a_file_follow_from_its_rate() -> None:
    """Not from the distance of its first two groups of frames, which is rounded to whole frames."""
    clip = embedding((3, 4, 4), 12, frame_seconds=(0.0, 0.46, 0.96, 1.46, 1.96, 2.46), second_per_grid=1.0002)
    for each in (video_part(clip, QWEN2_5), unencoded_video_part(clip, QWEN2_5, uuid="u")):
        assert loaded(each["video_embeds"]["second_per_grid_ts"]).tolist() == [1.0002]
    (interval,) = image_embeds([clip], QWEN2_5, modality="video")["video"]["second_per_grid_ts"]
    assert interval.tolist() == [1.0002]
    times = {"timestamps": [0.23, 1.21, 2.21], "second_per_grid": 1.0002}
    sent = reference_part((3, 4, 4), QWEN2_5, "clip", modality="video", **times)["video_embeds"]
    assert sent == {"video_grid_thw": [3, 4, 4], "second_per_grid_ts": [1.0002]}
    given = video_part(clip, QWEN2_5, timestamps=[0.0, 1.5, 4.0])["video_embeds"]["second_per_grid_ts"]
    assert loaded(given).tolist() == [2.0]
    single = video_part(embedding((1, 4, 4), 4, frame_seconds=(0.0,), second_per_grid=0.5), QWEN2_5)
    assert loaded(single["video_embeds"]["second_per_grid_ts"]).tolist() == [0.5]
    of_others = video_part(clip, MODEL)["video_embeds"]
    assert "second_per_grid_ts" not in of_others


def test_offline_data() -> None:
    several = [embedding(), embedding((1, 4, 8), 8), embedding((1, 2, 2), 1)]
    data = image_embeds(several, MODEL)["image"]
    assert torch.equal(data["image_embeds"], torch.cat([each.torch() for each in several]))
    assert data["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 8], [1, 2, 2]]
    assert [len(each) for each in image_embeds(several, INTERNVL)["image"]] == [4, 8, 1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (embedding(rows=3), r"embedding: 3 rows, its grid \(1, 4, 4\) has 4"),
        (embedding(width=8), "embedding is 8 wide, but tiny has width 12"),
        (embedding(grid=(0, 0, 0)), r"embedding.grid: \(0, 0, 0\) is not"),
        (embedding((2, 4, 4), 8), r"embedding.grid: \(2, 4, 4\) is the grid of a clip"),
        (embedding(kept=(0, 1)), "embedding: its tokens were pruned"),
    ],
)
def test_embeddings_that_vllm_would_misread(wrong: Embedding, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        image_part(wrong, MODEL)


def test_models_that_vllm_has_no_input_for() -> None:
    gemma = replace(MODEL, model_type="gemma3")
    with pytest.raises(ValueError, match="vLLM does not take embeddings of images for gemma3; it does for qwen2_vl,"):
        image_part(embedding(), gemma)
    with pytest.raises(ValueError, match="a part without its embedding for internvl_chat"):
        reference_part((1, 4, 4), INTERNVL, "cat")
    with pytest.raises(ValueError, match="embeddings of videos for internvl_chat"):
        video_part(embedding(), INTERNVL)


def test_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="uuid must be"):
        reference_part((1, 4, 4), MODEL, "")
    with pytest.raises(ValueError, match=r"grid: \(1, 3, 4\) is not"):
        reference_part((1, 3, 4), MODEL, "cat")
    with pytest.raises(ValueError, match=r"grid: \(2, 4, 4\) is the grid of a clip"):
        reference_part((2, 4, 4), MODEL, "clip")
    with pytest.raises(ValueError, match="timestamps: qwen3_vl needs"):
        video_part(embedding(), MODEL)
    with pytest.raises(ValueError, match="timestamps: 2 for a clip of 1"):
        video_part(embedding(), MODEL, timestamps=[0.0, 1.0])


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 64, 5000])
def test_the_pieces_of_a_file_are_the_file(rows: int) -> None:
    array = np.random.default_rng(rows).integers(0, 1 << 16, (rows, 101), dtype="<u2")
    file = TorchFile(array, "bfloat16")
    pieces = list(file)
    assert b"".join(pieces).decode() == torch_base64(array, "bfloat16")
    assert sum(map(len, pieces)) == len(file)
    assert max(map(len, pieces)) <= 1 << 19
    assert np.array_equal(loaded(b"".join(pieces).decode()).view(torch.uint16).numpy(), array)


def test_a_file_is_a_whole_archive_with_aligned_values() -> None:
    content = b64decode(torch_base64(np.arange(12, dtype="<u2").reshape(3, 4), "bfloat16"))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        assert archive.read("tensor/data/0") == np.arange(12, dtype="<u2").tobytes()
    assert content.index(np.arange(12, dtype="<u2").tobytes()) % 64 == 0


def test_offline_data_of_one_embedding_is_not_copied() -> None:
    one = embedding()
    data = image_embeds([one], MODEL)["image"]["image_embeds"]
    assert data.dtype == torch.bfloat16
    assert data.data_ptr() == one.torch().data_ptr()
