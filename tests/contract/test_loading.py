"""Only the tower's weights are read, whatever they are called, of every row of the table."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from broken import load
from checkpoints import ROWS, Checkpoints
from vitwire_server.towers.files import CheckpointError
from vitwire_server.towers.registry import FAMILIES

INDEX = "model.safetensors.index.json"


def is_vision(model_type: str, key: str) -> bool:
    return any(module.name(key) is not None for module in FAMILIES[model_type].modules.values())


@pytest.mark.parametrize("model_type", ROWS)
class TestLoading:
    """Shards of the rest may be absent; what is missing is named."""

    def test_shards_of_the_language_model_may_be_absent(
        self, model_type: str, checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(checkpoints(model_type), tmp_path / "copy"))
        weights = json.loads((folder / INDEX).read_text())["weight_map"]
        needed = {shard for key, shard in weights.items() if is_vision(model_type, key)}
        absent = set(weights.values()) - needed
        others = [key for key in weights if not is_vision(model_type, key)]
        assert absent or not any("text" in key or "language" in key for key in others), "a shard without vision weights"
        for shard in absent:
            (folder / shard).unlink()
        assert load(folder).fingerprint == load(checkpoints(model_type)).fingerprint
        missing = min(needed)
        (folder / missing).unlink()
        with pytest.raises(CheckpointError, match=missing):
            load(folder)

    def test_every_prefix_loads(self, model_type: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
        """Each module under each of its plain prefixes, in one file without an index."""
        source, family = checkpoints(model_type), FAMILIES[model_type]
        weights = {key: t for shard in sorted(source.glob("*.safetensors")) for key, t in load_file(shard).items()}
        for file in source.glob("*.json"):
            if file.name != INDEX:
                shutil.copy(file, tmp_path)
        plain = {
            name: [p for p, stands in module.prefixes.items() if not stands] for name, module in family.modules.items()
        }
        for turn in range(max(map(len, plain.values()))):
            renamed = {}
            for key, tensor in weights.items():
                for name, module in family.modules.items():
                    prefix = next((p for p in plain[name] if key.startswith(p)), None)
                    if module.name(key) is not None:
                        own = plain[name][turn % len(plain[name])] + key.removeprefix(prefix) if prefix else key
                        renamed[own] = tensor
            save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
            assert load(tmp_path).fingerprint == load(source).fingerprint, turn

    def test_a_missing_weight_is_named(self, model_type: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(checkpoints(model_type), tmp_path / "copy"))
        content = json.loads((folder / INDEX).read_text())
        tower = FAMILIES[model_type].tower
        gone = next(key for key in sorted(content["weight_map"]) if (tower.name(key) or "").endswith(".weight"))
        del content["weight_map"][gone]
        (folder / INDEX).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match="missing keys"):
            load(folder)
