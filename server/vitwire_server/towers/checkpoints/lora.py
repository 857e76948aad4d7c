"""A LoRA adapter in PEFT's layout: what it adds to the weights of a tower."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Family, Weights
from vitwire_server.towers.files import CheckpointError, read_json

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_ROOT = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(\.weight)?")
_VARIANTS = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "megatron_config",
    "monteclora_config",
    "layer_replication",
)
"""Settings with which an adapter is more than a product of two factors that is added to a weight."""
_PLAIN_STARTS = ("gaussian", "eva")
"""Initialisations that leave the base's weights as they were."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter on disk that can be merged; `name` appears in logs and GetModel."""

    name: str
    folder: Path
    config: Mapping[str, Any]

    @classmethod
    def read(cls, name: str, folder: Path) -> "Adapter":
        """Raises CheckpointError over an adapter that is not plain LoRA."""
        config = read_json(folder / _CONFIG)
        if config.get("peft_type") != "LORA":
            raise CheckpointError(
                f"{folder} is an adapter of type {config.get('peft_type')!r}: only LORA can be merged"
            )
        if used := [setting for setting in _VARIANTS if config.get(setting)]:
            raise CheckpointError(f"{folder} uses {', '.join(used)}: only plain LoRA can be merged")
        if config.get("bias", "none") != "none":
            raise CheckpointError(f"{folder} trained biases (bias={config['bias']!r}): only plain LoRA can be merged")
        start = config.get("init_lora_weights", True)
        if isinstance(start, str) and start not in _PLAIN_STARTS:
            raise CheckpointError(f"{folder} was initialised by {start!r}, which changes the base's own weights")
        return cls(name, folder, config)

    def merge(self, family: Family, config: Config, weights: Mapping[str, Weights]) -> None:
        """Add the adapter to the weights, in float32, of each module of `family`; `config` is the whole checkpoint's.

        Raises CheckpointError if it has nothing for the vision tower, or something that does not fit.
        """
        tensors = self._tensors()
        whole = [key for key in map(_adapted, tensors) if not _FACTOR.fullmatch(key)]
        if replaced := [key for key in whole if any(part.name(key) for part in family.modules.values())]:
            raise CheckpointError(f"{self.folder} replaces {replaced[0]} as a whole: only plain LoRA can be merged")
        changes = self._changes(tensors)
        found = False
        for part, module in family.modules.items():
            own = {name: change for key, change in changes.items() if (name := module.name(key)) is not None}
            for name, change in module.convert(own, module.configuration(config)).items():
                weight = weights[part].get(name)
                if weight is None or weight.shape != change.shape:
                    shape = tuple(change.shape)
                    raise CheckpointError(
                        f"{self.folder} changes {name} of shape {shape}, which the {part} does not have"
                    )
                weights[part][name] = weight.float() + change
                found = True
        if not found:
            raise CheckpointError(
                f"{self.folder} holds no weights of the vision tower: it adapts the language model only"
            )

    def _changes(self, tensors: Weights) -> Weights:
        """What is added to each weight, float32, by the weight's name in the model that was adapted."""
        factors: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            match = _FACTOR.fullmatch(_adapted(key))
            if match:
                kind = match["kind"] or ""
                factors.setdefault(match["module"], {})[kind + match["side"]] = tensor.float()
        return {f"{module}.weight": self._change(module, own) for module, own in factors.items()}

    def _tensors(self) -> Weights:
        path = self.folder / _WEIGHTS
        if not path.exists():
            raise CheckpointError(f"{self.folder} holds no {_WEIGHTS}")
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a safetensors file: {error}") from error

    def _change(self, module: str, own: Mapping[str, Tensor]) -> Tensor:
        if own.keys() not in ({"A", "B"}, {"embedding_A", "embedding_B"}):
            raise CheckpointError(f"{self.folder} holds only a part of the factors of {module}")
        down, up = (own[side] for side in sorted(own))
        if up.flatten(1).shape[1] != len(down):
            raise CheckpointError(f"{self.folder}: the factors of {module} are of different ranks")
        product = up.flatten(1) @ down.flatten(1) * self._scale(module, len(down))
        if "embedding_A" in own:
            return product.t()
        return product.view(len(up), *down.shape[1:])

    def _scale(self, module: str, rank: int) -> float:
        patterns: Mapping[str, float] = self.config.get("alpha_pattern") or {}
        matching = (alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
        alpha = float(next(matching, self.config.get("lora_alpha", 8)))
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def _adapted(key: str) -> str:
    """What a weight of the adapter is called in the model that was adapted."""
    return key.removeprefix(_ROOT)
