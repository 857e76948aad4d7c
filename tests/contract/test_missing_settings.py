"""Checkpoints whose processor's file is missing, or lacks settings: nothing is prepared with guessed values."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoImageProcessor

from checkpoints import ROWS, Checkpoints
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.towers.checkpoints.checkpoint import open_checkpoint
from vitwire_server.towers.files import CheckpointError
from vitwire_server.towers.registry import FAMILIES

FILE, OTHER = "preprocessor_config.json", "processor_config.json"
IN_CODE = {"deepseek_ocr2", "unlimited_ocr", "step3p7", "step3_vl", "step5_vl", "step_robotics"}
IN_CODE |= {"moondream3", "deepseek_vl_v2", "deepseek_vl_v2-deeplip_b_l", "phi4-siglip", "unlimited-ocr"}
"""Their authors publish no such file: the settings are in the processor's code, or at the top of the other file."""
KEYS = ("image_mean", "image_std", "resample", "rescale_factor", "do_rescale", "do_normalize")
OF_CODE = {"NVLM_D", "h2ovl_chat", "internvl_chat", "skywork_chat"}
"""Their authors' code normalises as for ImageNet, whatever class the file names."""
FIXED_FILTER = {"hunyuan_vl", "hy_v4_vl", "pix2struct"}
"""Their processors do not use the filter that they have as a setting."""


def without_weights(folder: Path, copy: Path) -> Path:
    return Path(shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True))


def images(folder: Path) -> Preprocessing:
    return open_checkpoint(str(folder)).preprocessing()[Modality.IMAGE]


@pytest.mark.parametrize("model_type", ROWS)
def test_a_missing_file_is_named(model_type: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = without_weights(checkpoints(model_type), tmp_path / "copy")
    for name in (FILE, OTHER):
        (folder / name).unlink(missing_ok=True)
    assert FAMILIES[model_type].in_code is (model_type in IN_CODE)
    if model_type in IN_CODE:
        images(folder)
    else:
        with pytest.raises(CheckpointError, match=f"copy holds no {FILE}, nor image_processor in {OTHER}"):
            images(folder)


@pytest.mark.parametrize("model_type", ROWS)
def test_settings_may_lie_in_the_other_file(model_type: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = without_weights(checkpoints(model_type), tmp_path / "copy")
    if not (folder / FILE).exists():
        pytest.skip("its authors publish no such file")
    wanted = images(folder)
    (folder / OTHER).write_text(json.dumps({"image_processor": json.loads((folder / FILE).read_text())}))
    (folder / FILE).unlink()
    assert images(folder) == wanted


@pytest.mark.parametrize("model_type", ROWS)
def test_a_setting_that_is_missing_is_the_class_default(
    model_type: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Or the file is refused."""
    folder = without_weights(checkpoints(model_type), tmp_path / "copy")
    full = json.loads((folder / FILE).read_text()) if (folder / FILE).exists() else {}
    for key in full.keys() & set(KEYS):
        (folder / FILE).write_text(json.dumps({name: value for name, value in full.items() if name != key}))
        try:
            stock = AutoImageProcessor.from_pretrained(folder)
        except ValueError:
            pytest.skip("transformers has no processor for it")
        try:
            own = images(folder)
        except CheckpointError as error:
            assert key in str(error)
            continue
        if stock.do_rescale is not None and stock.rescale_factor is not None:
            assert own.rescale_factor == (stock.rescale_factor if stock.do_rescale else 1.0), key
        if (
            stock.do_normalize
            and stock.image_mean
            and not (model_type in OF_CODE and key in ("image_mean", "image_std"))
        ):
            assert (own.mean, own.std) == (tuple(stock.image_mean), tuple(stock.image_std)), key
        if model_type not in FIXED_FILTER:
            assert own.resample == stock.resample, key
