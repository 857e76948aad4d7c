"""Embeddings of a real server through SGLang's own processing of inputs, up to the rows that its model reads."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
from sglang.srt.managers.mm_schedule import get_embedding_and_mask
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration

from vitwire import Embedding
from vitwire.integrations.sglang import expanded, precomputed


def tower(_: Any) -> torch.Tensor:
    """In the place of SGLang's own."""
    raise AssertionError("SGLang would run its own tower")


async def processed(sglang: Any, prompt: str | list[int], image_data: list[Any]) -> Any:
    """What SGLang's tokenizer manager makes of a request."""
    request = SimpleNamespace(video_data=None, audio_data=None, rid="r", mm_content_hashes=None)
    return await sglang.processor.process_mm_data_async(image_data, prompt, request, max_req_input_len=8192)


@pytest.mark.parametrize("count", [1, 3])
async def test_sglang_reads_the_rows_of_each_image_at_its_place(
    sglang: Any, embeddings: list[Embedding], count: int
) -> None:
    chosen = embeddings[:count]
    ids = expanded(sglang.ids(count), chosen, sglang.config.image_token_id)
    output = await processed(sglang, ids, precomputed(chosen))

    assert list(output.input_ids) == ids
    (item,) = output.mm_items
    spans = [(start, end) for start, end in item.offsets]
    assert [end - start + 1 for start, end in spans] == [each.shape[0] for each in chosen]
    assert all(ids[start] == ids[end] == sglang.config.image_token_id for start, end in spans)

    padded = torch.tensor(output.padded_input_ids)
    rows, mask, _ = get_embedding_and_mask(
        tower, [item], torch.tensor(sorted(item.padding_values())), padded, [0, 1], [0], [len(ids)], [item.offsets]
    )
    expected = torch.cat([each.torch() for each in chosen])
    assert rows.dtype == expected.dtype
    assert torch.equal(rows, expected)
    assert mask.flatten().nonzero().flatten().tolist() == [at for start, end in spans for at in range(start, end + 1)]


async def test_positions_follow_from_the_grids(sglang: Any, embeddings: list[Embedding]) -> None:
    ids = expanded(sglang.ids(2), embeddings[:2], sglang.config.image_token_id)
    output = await processed(sglang, ids, precomputed(embeddings[:2]))
    expected, delta = MRotaryEmbedding.get_rope_index(
        spatial_merge_size=2,
        image_token_id=sglang.config.image_token_id,
        video_token_id=sglang.config.video_token_id,
        vision_start_token_id=sglang.config.vision_start_token_id,
        model_type="qwen3_vl",
        input_ids=torch.tensor([ids]),
        image_grid_thw=torch.tensor([each.grid for each in embeddings[:2]]),
    )
    assert torch.equal(output.mrope_positions, expected.squeeze(1))
    assert torch.equal(output.mrope_position_delta.flatten(), delta.flatten())


def test_sglang_splits_deepstack_levels_as_vitwire_lays_them_out(sglang: Any, embeddings: list[Embedding]) -> None:
    levels = len(sglang.config.vision_config.deepstack_visual_indexes)
    model = SimpleNamespace(config=sglang.config.text_config, num_deepstack_embeddings=levels)
    main, deepstack = Qwen3VLForConditionalGeneration.separate_deepstack_embeds(model, embeddings[0].torch())
    assert torch.equal(main.float(), torch.from_numpy(embeddings[0].main))
    expected = torch.cat([torch.from_numpy(each) for each in embeddings[0].deepstack], dim=-1)
    assert torch.equal(deepstack.float(), expected)


async def test_json_cannot_carry_embeddings_to_sglangs_server(sglang: Any, embeddings: list[Embedding]) -> None:
    """Why there is no content part for SGLang's server: its code needs tensors, and JSON gives it lists."""
    ids = expanded(sglang.ids(1), embeddings[:1], sglang.config.image_token_id)
    (entry,) = precomputed(embeddings[:1])
    entry = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in entry.items()}
    with pytest.raises(TypeError, match="buffer API"):
        await processed(sglang, ids, [entry])


def test_more_than_one_entry_is_refused_by_sglang(sglang: Any, embeddings: list[Embedding]) -> None:
    with pytest.raises(ValueError, match="exactly one item"):
        sglang.processor.validate_mm_data(precomputed(embeddings[:1]) + precomputed(embeddings[1:2]))
