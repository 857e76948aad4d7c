"""Checkpoints of tiles and of raster patches that are broken, or of a kind that is not served: one sentence each."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from broken import Break, config, edit, load, refused, write
from checkpoints import Checkpoints
from client_models import client_model
from raster_reference import RASTER
from reference import TOLERANCE, error
from rigs import Rig
from tile_reference import TileReference
from vitwire_server.core.grids import Grid

CLIP = {"model_type": "clip_vision_model", "hidden_size": 64, "num_attention_heads": 4}
CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"


@pytest.mark.parametrize(
    ("model_type", "harm", "message"),
    [
        ("internvl", config(vision_feature_layer=-2), "vision_feature_layer -2"),
        ("internvl", config(downsample_ratio=0.25), "do not fit the vision projector"),
        ("internvl", config(vision_config__image_size=[112, 56]), "not square|not a square"),
        ("internvl", edit(PROCESSOR, max_patches=0), "cannot be cut"),
        ("internvl", edit(PROCESSOR, min_patches=9), "cannot be cut"),
        ("internvl_chat", config(ps_version="v1"), "ps_version is 'v1'"),
        ("internvl_chat", config(force_image_size=224), "force_image_size is 224"),
        ("interns1", config(downsample_ratio=0.75), "downsample_ratio is 0.75, but must be 1"),
        ("NemotronH_Nano_VL_V2", config(ps_version="v1"), "ps_version is 'v1', but must be 'v2'"),
        ("Llama_Nemotron_Nano_VL", config(projector_hidden_size=96), "projector_hidden_size is 96, but must be"),
        ("alpamayo2_super", config(vlm_config={}), "vision_config"),
        ("bailing_moe_v3_vl", config(text_config={}), "hidden_size"),
        ("internvl_chat", config(select_layer=-4), "vision_feature_layer -4"),
        ("internvl_chat", config(llm_config={}), "hidden_size"),
        ("internvl_chat", config(vision_config__num_hidden_layers=9), "holds weights of 3 layers"),
        ("llava_onevision", edit(PROCESSOR, image_grid_pinpoints=[[56, 57]]), "multiples of 56"),
        ("llava_onevision", config(vision_config=CLIP), "vision_config.model_type is 'clip_vision_model', but must"),
        ("gemma3", config(mm_tokens_per_image=10), "mm_tokens_per_image is 10, but must be a square"),
        ("llama4", config(vision_config__pixel_shuffle_ratio=0.75), "pixel_shuffle_ratio is 0.75, but must be 1"),
        ("llama4", config(vision_config__pixel_shuffle_ratio=0.0), "pixel_shuffle_ratio is 0.0, but must be 1"),
        ("internvl", config(downsample_ratio=0.75), "downsample_ratio is 0.75, but must be 1"),
        ("internvl", config(vision_feature_select_strategy="full"), "strategy is 'full', but must be 'default'"),
        (
            "ovis2",
            config(vision_config__tokenize_function="gumbel_argmax"),
            "vision_config.tokenize_function is 'gumbel_argmax', but must be 'softmax'",
        ),
        (
            "aria",
            edit(PROCESSOR, max_image_size=980),
            "max_image_size is 980, but must be vision_config.image_size, 490",
        ),
        ("florence2", config(vision_config={"model_type": "davit"}), "depths"),
        (
            "florence2",
            config(vision_config={"model_type": "davit", "image_feature_source": ["last_frame"]}),
            "image_feature_source is \\['last_frame'\\], but must be",
        ),
        ("florence2", edit(PROCESSOR, size={"height": 288, "width": 288}), "9 rows of patches are more than"),
        ("florence2", edit(PROCESSOR, do_center_crop=True), "unsupported do_center_crop"),
        ("aria", edit(PROCESSOR, split_image=True), "split_image"),
        ("aria", config(projector_patch_to_query_dict={"25": 8}), "projector_patch_to_query_dict is {25: 8}"),
        (
            "ovis",
            config(visual_tokenizer_config__backbone_config__model_type="siglip_vision_model"),
            "backbone_config.model_type is 'siglip_vision_model', but must be 'aimv2'",
        ),
        ("ovis2", config(vision_config__hidden_stride=3), "hidden_stride is 3, but must be a divisor"),
        (
            "llava-pixtral",
            config(vision_feature_select_strategy="default"),
            "strategy is 'default', but must be 'full'",
        ),
        (
            "mllama",
            edit(PROCESSOR, max_image_tiles=2),
            "max_image_tiles is 2, but must be vision_config.max_num_tiles, 4",
        ),
        (
            "mllama",
            edit(
                CONFIG,
                vision_config__supported_aspect_ratios=[[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [5, 1]],
            ),
            "more than 4 tiles",
        ),
        ("phi4_multimodal", config(vision_config__crop_size=224), "image_size is 112, but must be crop_size"),
        (
            "phi4mm",
            config(embd_layer__image_embd_layer__hd_transform_order="glb_sub"),
            "embd_layer.image_embd_layer.hd_transform_order is 'glb_sub', but must be 'sub_glb'",
        ),
        ("llama4", edit(PROCESSOR, resize_to_max_canvas=True), "resize_to_max_canvas"),
        (
            "step3p7",
            edit(PROCESSOR, patch_size="x"),
            "copy/preprocessor_config.json: .* patch_size is .x., but must be a number",
        ),
        (
            "deepseek_ocr2",
            write("processor_config.json", '{"image_processor": {"tile_size": {"height": 1, "width": 2}}}'),
            "copy/processor_config.json: .* tile_size .* is not square",
        ),
        (
            "step3p7",
            write("processor_config.json", '{"image_processor": 5}'),
            "processor_config.json holds no settings",
        ),
        ("deepseek_ocr2", edit(PROCESSOR, tile_size=80), "does not become 144 tokens"),
        ("deepseek_ocr2", edit(PROCESSOR, crop_to_patches=False), "crop_to_patches"),
        ("llava", config(vision_config={"model_type": "dinov2"}), "model_type is 'dinov2', but must be 'clip_vis"),
        ("mistral3", config(vision_config=CLIP), "'clip_vision_model', but must be 'pixtral'"),
        ("llava", config(vision_feature_layer=-5), "unsupported vision_feature_layer -5: the tower has 3"),
        (
            "llava_next",
            edit(PROCESSOR, crop_size={"height": 28, "width": 28}),
            "crop_size is 28, but must be image_size, 56",
        ),
        (
            "llava",
            edit(PROCESSOR, crop_size={"height": 28, "width": 28}),
            "crop_size .*28.* does not make tiles of 56 x 56",
        ),
        ("llava", edit(PROCESSOR, do_center_crop=False), "does not make one tile of an image"),
        ("mistral3", edit(PROCESSOR, size={"longest_edge": 20}), "less than one token"),
        ("gemma4", config(vision_config__num_key_value_heads=2), "grouped queries"),
        ("idefics2", config(perceiver_config__resampler_n_latents=5), "do not fit the vision connector"),
        ("granite_docling", edit(PROCESSOR, fine_route=True), "unsupported fine_route; supported: the coarse path"),
        ("granite_docling", edit(PROCESSOR, size=56), "size is 56, but must be the tower's image_size, 112"),
        (
            "idefics3",
            edit(PROCESSOR, max_image_size={"longest_edge": 70}),
            "max_image_size is 70, but must be the tower's",
        ),
        ("idefics3", edit(PROCESSOR, size={"height": 56, "width": 56}), "size.longest_edge is None, but must be"),
        ("smolvlm", edit(PROCESSOR, size={"longest_edge": 5000}), "size.longest_edge is 5000, but must be"),
        ("siglip2", config(vision_config__num_patches=60), "num_patches is 60, but must be a square"),
        ("lfm2_vl", config(vision_config__num_patches=60), "num_patches is 60, but must be a square"),
        ("hy_v4_vl", config(vision_config__interpolate_mode="bicubic"), "interpolate_mode is 'bicubic', but must be"),
        ("hy_v4_vl", config(vision_config__out_hidden_size=47), "do not fit the vision tower"),
        ("phi3_v", config(embd_layer__hd_transform_order="glb_sub"), "hd_transform_order is 'glb_sub', but must be"),
        ("phi3_v", config(img_processor__name="siglip"), "img_processor.name is 'siglip', but must be"),
        ("phi3_v", config(img_processor__layer_idx=-9), "feature_layer is -9, but must be from"),
        ("phi4-siglip", config(mm_projector_type="linear"), "mm_projector_type is 'linear', but must be 'mlp2x_gelu'"),
        ("phi4-siglip", config(mm_vision_tower="google/siglip-large"), "mm_vision_tower is .* but must be a NaFlex"),
        ("phi4-siglip", config(min_num_patches=65), "min_pixels 16640 and max_pixels 16384 must satisfy"),
        ("unlimited-ocr", config(projector_config__projector_type="mlp"), "projector_type is 'mlp'"),
        ("minicpmv", config(version=2.5), r"version is 2\.5, but must be 2\.6 or 4\.0 or 4\.5"),
        ("minicpmv", config(version=None), "version is None, but must be"),
        ("minicpmv", config(query_num=0), "query_num is 0, but must be from 1 to 4095"),
        ("minicpmv", config(query_num=64), "do not fit the vision resampler"),
        ("minicpmv", config(drop_vision_last_layer=True), "unexpected keys"),
        ("deepseek_vl_v2", config(vision_config__model_name="deepencoderv2"), "model_name is 'deepencoderv2'"),
        ("deepseek_vl_v2", config(vision_config__model_name="deeplip_b_l"), "not a DeepSeek-OCR .*projector_type is"),
        ("deepseek_vl_v2", config(projector_config__projector_type="linear"), "projector_type is 'linear'"),
        (
            "deepseek_vl_v2",
            edit("processor_config.json", candidate_resolutions=[[76, 80]]),
            r"candidate_resolutions \[76, 80\] are not multiples of 76",
        ),
        ("eagle_2_5_vl", config(select_layer=-4), "vision_feature_layer -4"),
        ("eagle_2_5_vl", config(vision_config=CLIP), "vision_config.model_type is 'clip_vision_model'"),
        ("eagle_2_5_vl", edit(PROCESSOR, pad_during_tiling=True), "unsupported pad_during_tiling"),
        ("NVLM_D", config(llm_config__intermediate_size=80), "do not fit the vision projector"),
    ],
)
def test_what_is_not_served_is_named(model_type: str, harm: Break, message: str, copied: Checkpoints) -> None:
    assert "copy" in refused(copied(model_type), harm, message)


@pytest.mark.parametrize("model_type", ["gemma3", "deepseek_vl", "llava_onevision", "deepseek_vl_hybrid"])
def test_a_pooling_head_is_left_out(model_type: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """SigLIP's head, in the weights and in the configuration, changes nothing."""
    source = checkpoints(model_type)
    weights = {key: t for shard in sorted(source.glob("*.safetensors")) for key, t in load_file(shard).items()}
    stem = next(key for key in weights if key.endswith("post_layernorm.weight")).removesuffix("post_layernorm.weight")
    save_file({**weights, f"{stem}head.probe": torch.zeros(1, 1, 64)}, tmp_path / "model.safetensors")
    for name in (CONFIG, PROCESSOR):
        shutil.copy(source / name, tmp_path)
    config(vision_config__vision_use_head=True)(tmp_path)
    assert load(tmp_path).fingerprint == load(source).fingerprint


def test_features_are_normalised_where_the_language_model_predicts_ahead(copied: Checkpoints) -> None:
    folder = copied("nemotron_h_omni")
    plain = Rig.of(folder, torch.float32, torch.device("cpu"), sizes=())
    config(text_config__num_nextn_predict_layers=1)(folder)
    rig, grid = Rig.of(folder, torch.float32, torch.device("cpu"), sizes=()), Grid(1, 8, 6)
    (rows,), (before,) = rig.run(rig.items([grid])), plain.run(plain.items([grid]))
    assert error(rows, RASTER["nemotron_h_omni"](folder).item(grid, rig.pixels(grid, 0))) <= TOLERANCE
    assert error(rows, before) > 1e-2


def test_a_strategy_that_leaves_out_the_first_row_of_a_tile(checkpoints: Checkpoints, copied: Checkpoints) -> None:
    folder = copied("llava_onevision")
    config(vision_feature_select_strategy="default")(folder)
    rig, reference = Rig.of(folder, torch.float32, torch.device("cpu"), sizes=()), TileReference(folder)
    grid = Grid(3, 1, 2)
    expected = reference.item(grid, rig.pixels(grid, 0))
    whole = TileReference(checkpoints("llava_onevision")).item(grid, rig.pixels(grid, 0))
    assert len(expected) == len(whole) - grid.t
    (rows,) = rig.run(rig.items([grid]))
    assert error(rows, expected) <= TOLERANCE


def test_images_are_not_prepared_for_a_processor_that_pads_before_it_resizes(copied: Checkpoints) -> None:
    folder = copied("llava")
    assert "image" in client_model(folder).prepared
    edit(PROCESSOR, do_pad=True)(folder)
    assert "image" not in client_model(folder).prepared


def test_published_files_of_vipllava_call_the_layers_by_another_name(
    checkpoints: Checkpoints, copied: Checkpoints
) -> None:
    folder = copied("vipllava")
    settings = json.loads((folder / CONFIG).read_text())
    settings["vision_feature_layers"] = settings.pop("vision_feature_layer")
    (folder / CONFIG).write_text(json.dumps(settings))
    grid = Grid(1, 1, 1)
    rows, expected = (
        rig.run(rig.items([grid]))[0]
        for rig in (
            Rig.of(own, torch.float32, torch.device("cpu"), sizes=()) for own in (folder, checkpoints("vipllava"))
        )
    )
    assert error(rows, expected) == 0


def test_rows_depend_on_the_layout_where_the_tower_knows_it(checkpoints: Checkpoints) -> None:
    rig = Rig.of(checkpoints("mllama"), torch.float32, torch.device("cpu"), sizes=())
    pixels = rig.pixels(Grid(2, 1, 2), 0)
    beside, above, blank = rig.run(
        [rig.item(grid, pixels) for grid in (Grid(2, 1, 2), Grid(2, 2, 1))]
        + [rig.item(Grid(4, 1, 2), torch.cat([pixels, torch.ones_like(pixels)]))]
    )
    assert error(beside, above) > 10 * TOLERANCE
    assert error(beside, blank[: len(beside)]) <= TOLERANCE
    assert len(blank) == 2 * len(beside)


_FLORENCE = {
    r"^model\.multi_modal_projector\.image_position_embed\.": "image_pos_embed.",
    r"^model\.multi_modal_projector\.image_projection\.weight$": "image_projection",
    r"^model\.(multi_modal_projector\.)?": "",
    r"^(vision_tower\.convs\.\d+)\.conv\.": r"\1.proj.",
    r"(_block\.conv[12])\.": r"\1.fn.dw.",
    r"_block\.ffn\.": "_block.ffn.fn.net.",
    r"_attn\.": "_attn.fn.",
    r"spatial_block\.norm1\.": "spatial_block.window_attn.norm.",
    r"channel_block\.norm1\.": "channel_block.channel_attn.norm.",
    r"_block\.norm2\.": "_block.ffn.norm.",
}
"""From transformers' names to those of microsoft/Florence-2-base and -large."""


def test_florence_in_the_layout_of_its_authors(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = checkpoints("florence2")
    weights = {}
    for shard in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            for pattern, replacement in _FLORENCE.items():
                name = re.sub(pattern, replacement, name)  # noqa: PLW2901 - renamed step by step
            weights[name] = tensor.T.contiguous() if name == "image_projection" else tensor
    save_file(weights, tmp_path / "model.safetensors")
    shutil.copy(source / PROCESSOR, tmp_path)
    settings = json.loads((source / CONFIG).read_text())
    vision = settings["vision_config"]
    vision |= {
        "dim_embed": vision.pop("embed_dim"),
        "image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"],
        "image_pos_embed": {"max_pos_embeddings": vision.pop("max_position_embeddings"), "type": "learned_abs_2d"},
        "model_type": "davit",
        "visual_temporal_embedding": {
            "max_temporal_embeddings": vision.pop("max_temporal_embeddings"),
            "type": "COSINE",
        },
    }
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    assert "vision_tower.blocks.2.1.channel_block.ffn.fn.net.fc1.weight" in weights
    own, theirs = (Rig.of(folder, torch.float32, torch.device("cpu"), sizes=()) for folder in (tmp_path, source))
    assert load(tmp_path).fingerprint == load(source).fingerprint
    (mine,), (other,) = (rig.run(rig.items([Grid(1, 1, 1)])) for rig in (own, theirs))
    assert error(mine, other) <= TOLERANCE
