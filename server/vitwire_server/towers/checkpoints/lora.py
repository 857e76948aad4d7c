"""A LoRA adapter in PEFT's layout: what it adds to the weights of a tower."""

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitwire_children.jobs import Program, done_by
from vitwire_children.serving import NotDone
from vitwire_server.towers.checkpoints.weights import BROKEN, refused
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Family, Module, Weights
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
_LARGEST_ALPHA = 1e38
"""Below the largest float32, in which changes are computed."""
_PLAIN_STARTS = ("gaussian", "eva")
"""Initialisations that leave the base's weights as they were."""

_MATCHING = Program("vitwire_server.towers.checkpoints.matching")
_SECONDS, _WALL_SECONDS = 5.0, 60.0
"""Processor time, of which a busy machine takes nothing, and wall-clock time."""


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
            raise CheckpointError(f"{folder} was initialised by {start!r}, which changes the base weights")
        return cls(name, folder, config)

    def merge(self, family: Family, config: Config, weights: Mapping[str, Weights]) -> None:
        """Add the adapter to the weights, in float32, of each module of `family`; `config` is the whole checkpoint's.

        Raises CheckpointError if it has nothing for the vision tower, or something that does not fit.
        """
        modules = family.modules
        changes = self._changes(list(modules.values()))
        found = False
        for part, module in modules.items():
            for name, change in self._own(part, module, config, changes).items():
                weight = weights[part].get(name)
                if weight is None or weight.shape != change.shape:
                    form = f"{name} of shape {tuple(change.shape)}"
                    raise CheckpointError(f"{self.folder} changes {form}, which the {part} does not have")
                weights[part][name] = weight.float() + change
                found = True
        if not found:
            only = "it adapts the language model only"
            raise CheckpointError(f"{self.folder} holds no weights of the vision tower: {only}")

    def _own(self, part: str, module: Module, config: Config, changes: Weights) -> Weights:
        """The changes of a module's weights, by their names in it. Raises CheckpointError."""
        path, own = self.folder / _WEIGHTS, Weights()
        for key, change in changes.items():
            name = module.name(key)
            if name in own:
                raise CheckpointError(f"{path} changes {name} of the {part} twice")
            if name is not None:
                own[name] = change
        with refused(f"{path}: the factors do not fit the vision {part}", *BROKEN):
            return module.convert(own, module.configuration(config))

    def _changes(self, modules: Sequence[Module]) -> Weights:
        """The change of each weight, float32, by the weight's name in the model that was adapted."""
        path = self.folder / _WEIGHTS
        if not path.exists():
            raise CheckpointError(f"{self.folder} holds no {_WEIGHTS}")
        with refused(f"{path} is not a safetensors file", SafetensorError, OSError):
            tensors = {key.removeprefix(_ROOT): tensor for key, tensor in load_file(path).items()}
        factors: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            match = _FACTOR.fullmatch(key)
            if not match:
                if any(module.name(key) for module in modules):
                    raise CheckpointError(f"{self.folder} replaces {key} as a whole: only plain LoRA can be merged")
                continue
            if tensor.ndim < 2 or not tensor.numel() or not tensor.is_floating_point():
                form = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                reason = "factors must be matrices of floating point numbers, of rank 1 or more"
                raise CheckpointError(f"{path}: {key} is {form}, but {reason}")
            kind = match["kind"] or ""
            factors.setdefault(match["module"], {})[kind + match["side"]] = tensor.float()
        alphas = self._alphas(list(factors))
        return {f"{module}.weight": self._change(module, own, alphas[module]) for module, own in factors.items()}

    def _change(self, module: str, own: Mapping[str, Tensor], alpha: float) -> Tensor:
        if own.keys() not in ({"A", "B"}, {"embedding_A", "embedding_B"}):
            raise CheckpointError(f"{self.folder} holds only a part of the factors of {module}")
        down, up = (own[side] for side in sorted(own))
        rank = len(down)
        if up.flatten(1).shape[1] != rank:
            raise CheckpointError(f"{self.folder}: the factors of {module} have different ranks")
        scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        product = up.flatten(1) @ down.flatten(1) * scale
        if not product.isfinite().all():
            raise CheckpointError(f"{self.folder}: the factors of {module} give values that are not finite")
        if "embedding_A" in own:
            return product.t()
        return product.view(len(up), *down.shape[1:])

    def _alphas(self, modules: list[str]) -> dict[str, float]:
        """The scale of each module's factors, before their rank divides it. Raises CheckpointError."""
        patterns = self.config.get("alpha_pattern") or {}
        if not isinstance(patterns, dict):
            raise CheckpointError(f"{self.folder / _CONFIG}: alpha_pattern must be an object of names and numbers")
        found: list[int | None] = [None] * len(modules)
        if patterns:
            matching = done_by(_MATCHING, (list(patterns), modules), wall=_WALL_SECONDS, seconds=_SECONDS)
            with refused(f"{self.folder / _CONFIG}: alpha_pattern cannot be used", NotDone):
                found = asyncio.run(matching)
        alphas = [self._number(f"alpha_pattern.{key}", value) for key, value in patterns.items()]
        default = self._number("lora_alpha", self.config.get("lora_alpha", 8))
        return {module: default if at is None else alphas[at] for module, at in zip(modules, found, strict=True)}

    def _number(self, field: str, value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST_ALPHA:
            return float(value)
        raise CheckpointError(f"{self.folder / _CONFIG}: {field} is {value!r}, but must be a finite number")
