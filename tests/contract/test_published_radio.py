"""C-RADIO 2 and 3 as NVIDIA publishes them: no model_type, and the arguments of their code as configuration."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file

from broken import edit, load
from checkpoints import Checkpoints
from reference import TOLERANCE, error
from rigs import Rig
from vitwire_server.core.grids import Grid
from vitwire_server.core.pooling import Pooling
from vitwire_server.towers.files import CheckpointError
from vitwire_server.towers.registry import FAMILIES

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version(FAMILIES["radio"].transformers), reason="transformers has no C-RADIO"
)
TEACHERS: list[dict[str, Any]] = [{"name": "clip"}, {"name": "sam", "use_summary": False}, {"name": "dino"}]
CONFIG: dict[str, Any] = {
    "architectures": ["RADIOModel"],
    "auto_map": {"AutoConfig": "hf_model.RADIOConfig", "AutoModel": "hf_model.RADIOModel"},
    "args": {
        "cls_token_per_teacher": True,
        "cpe_max_size": 112,
        "model": "vit_tiny_patch14_224",
        "model_kwargs": {"weight_init": "skip"},
        "register_multiple": 8,
        "teachers": TEACHERS,
    },
    "adaptor_names": None,
    "feature_normalizer_config": None,
    "patch_size": 14,
    "torch_dtype": "float32",
    "vitdet_window_size": None,
}


@pytest.fixture(params=[False, True], ids=["plain", "layer-scale"])
def published(request: pytest.FixtureRequest, checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A checkpoint with random weights under NVIDIA's names, and the same of transformers' class as `stock`.

    With layer scale, as of DINOv2's form, and with weights that no row passes through.
    """
    from transformers.models.radio.modeling_radio import RadioConfig, RadioModel  # noqa: PLC0415 - may be missing

    torch.manual_seed(3)
    config = RadioConfig(
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        patch_size=14,
        max_img_size=112,
        num_cls_tokens=3,
        num_registers=5,
        summary_idxs=[0, 2],
    )
    model = RadioModel(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    for layer in model.encoder.layer:
        for scale in (layer.layer_scale1, layer.layer_scale2):
            torch.nn.init.constant_(scale.lambda1, 0.7 if request.param else 1.0)
    model.save_pretrained(tmp_path / "stock")
    folder = Path(shutil.copytree(tmp_path / "stock", tmp_path / "copy"))
    weights = load_file(folder / "model.safetensors")
    scales = {name: weights.pop(name) for name in list(weights) if "layer_scale" in name}
    shutil.copy(checkpoints("radio") / "preprocessor_config.json", folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if request.param:
        edit("config.json", args__model="vit_tiny_patch14_v2_224")(folder)
        named = {re.sub(r"layer_scale(\d)\.lambda1", r"ls\1.grandma", name): own for name, own in scales.items()}
        unused = {"radio_model.model.reg_token": torch.ones(4), "radio_model.adaptors.clip.fc1.weight": torch.ones(4)}
        weights |= named | unused
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("pooling", "output"), [(Pooling.NONE, "features"), (Pooling.CLS, "summary")])
def test_rows_are_those_of_transformers(pooling: Pooling, output: str, published: Path) -> None:
    from transformers.models.radio.modeling_radio import RadioModel  # noqa: PLC0415 - may be missing

    grid = Grid(2, 1, 1)
    rig = Rig.of(published, torch.float32, torch.device("cpu"), sizes=(), pooling=pooling)
    stock = RadioModel.from_pretrained(published.with_name("stock"), dtype=torch.float32)
    with torch.no_grad():
        theirs = getattr(stock(rig.pixels(grid, 0)), output)
    assert error(rig.run(rig.items([grid]))[0], theirs.reshape(-1, theirs.shape[-1]).numpy()) <= TOLERANCE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"args__model": "dinov2_vitg14_reg"}, r"args\.model is 'dinov2_vitg14_reg', but must be vit_SIZE"),
        ({"args__model_norm": True}, r"args\.model_norm is True, but must be empty"),
        ({"args__model_kwargs": {"scaled_ln": True}}, r"args\.model_kwargs is .*, but must be empty"),
        ({"feature_normalizer_config": {"embed_dim": 192}}, "feature_normalizer_config is .*, but must be empty"),
        ({"vitdet_window_size": 4}, "vitdet_window_size is 4, but must be empty"),
        ({"args": None}, r"config\.json is not a C-RADIO"),
        ({"args": {}}, r"config\.json is not a C-RADIO"),
        ({"args__teachers": [{}]}, r"config\.json is not a C-RADIO"),
        ({"args__register_multiple": 4}, "cls_register_token is of shape"),
        ({"architectures": ["OtherModel"]}, r"config\.json has no model_type; docs/models\.md lists"),
        ({"architectures": [""]}, r"config\.json has no model_type"),
    ],
)
def test_what_is_not_served_is_named(changes: dict[str, Any], message: str, published: Path) -> None:
    edit("config.json", **changes)(published)
    with pytest.raises(CheckpointError, match=message):
        load(published)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("qwen3vl", "'qwen3vl' is not supported; did you mean qwen3_vl"),
        ("Clip", "did you mean clip"),
        ("bert", r"'bert' is not supported; docs/models\.md lists the \d+ that are supported"),
        (["clip"], "is not supported"),
    ],
)
def test_a_misspelt_model_type_is_answered_by_the_nearest(model_type: object, message: str, published: Path) -> None:
    edit("config.json", model_type=model_type)(published)
    with pytest.raises(CheckpointError, match=message) as refused:
        load(published)
    assert len(str(refused.value)) < 300


def test_model_types_that_the_documentation_leaves_out_are_refused_by_name(published: Path) -> None:
    section = (
        Path("docs/models.md").read_text().partition("## Looked at and left out")[2].partition("## Unsupported")[0]
    )
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    named = [name for cell in cells for name in re.findall(r"`(.+?)`", cell)]
    assert {"molmo", "chatglm", "exaone4_5", "timm_wrapper"} < {*named}
    for name in named:
        edit("config.json", model_type=name)(published)
        with pytest.raises(CheckpointError, match=f"model_type '{re.escape(name)}' is not supported"):
            load(published)
