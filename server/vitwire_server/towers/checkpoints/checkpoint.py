"""A checkpoint in hub layout: its configuration is read first, then only its vision tower is built."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, Resizing
from vitwire_server.core.pooling import Pooling
from vitwire_server.towers.checkpoints.lora import Adapter
from vitwire_server.towers.checkpoints.weights import BROKEN, download, fingerprint, read_weights, refused
from vitwire_server.towers.configs import Config, absurd_layers
from vitwire_server.towers.family import TESTED, Family, Module, Weights
from vitwire_server.towers.files import CheckpointError, local_folder, read_json
from vitwire_server.towers.processors.sampling import read_sampling
from vitwire_server.towers.processors.settings import ProcessorFiles
from vitwire_server.towers.registry import family_of, unsupported
from vitwire_server.towers.tower import Tower

_log = logging.getLogger(__name__)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk whose configuration was read and whose family is in the table."""

    model_id: str
    folder: Path
    on_hub: bool
    """True if `folder` is the hub's cache, where shards are fetched as they are needed."""
    family: Family
    config: Config
    """The whole checkpoint's configuration."""
    dtype: torch.dtype
    """Type of its weights, by its configuration."""
    matryoshka: tuple[int, ...] | None = None
    """Lengths that its vectors may be cut to, any if empty; None if they may not be cut."""

    @property
    def pooling(self) -> Pooling:
        return self.family.pooler.pooling if self.family.pooler else Pooling.NONE

    @property
    def poolings(self) -> tuple[Pooling, ...]:
        return self.family.poolings(self.config)

    def pooled(self, pooling: Pooling) -> "Checkpoint":
        """The same checkpoint with rows pooled. Raises ValueError if it does not offer that."""
        return replace(self, family=self.family.pooled(pooling, self.config))

    def preprocessing(self) -> dict[Modality, Preprocessing]:
        """Settings of its processor for each modality it takes. Raises CheckpointError."""
        found = self.family.preprocessing(self.folder, self.config)
        clips = found.get(Modality.VIDEO)
        if clips is None or clips.resizing is Resizing.OTHER:
            return found
        with refused(f"{self.folder}: the video processor's settings cannot be used", ValueError):
            sampling = read_sampling(self.family.video_processor, ProcessorFiles.read(self.folder).sampling)
        return {**found, Modality.VIDEO: replace(clips, sampling=sampling)}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A tower on its device, and the SHA-256 over its weights and its pooling."""

    tower: Tower
    fingerprint: str


def open_checkpoint(model: str) -> Checkpoint:
    """Find a directory or a hub id and read its configuration.

    Of a hub id, only the configuration is fetched here. Raises CheckpointError.
    """
    local = local_folder(model)
    folder, on_hub = local or download(model, ["*.json"]), local is None
    settings = read_json(folder / "config.json")
    family = family_of(settings)
    if family is None:
        raise CheckpointError(f"{model}: {unsupported(settings.get('model_type'))}")
    if (installed := Version(transformers.__version__)) < Version(family.transformers):
        raise CheckpointError(
            f"{model}: {family.title} needs transformers {family.transformers} or newer, {installed} is installed"
        )
    if installed > Version(TESTED[-1]):
        _log.warning("transformers %s is newer than %s, the newest that was tested", installed, TESTED[-1])
    config = _read_config(folder, settings, family)
    dtype = config.dtype or family.tower.configuration(config).dtype or torch.float32
    if dtype not in _DTYPES:
        raise CheckpointError(f"{model}: weights in {dtype} are not supported")
    model_id = model if on_hub else folder.resolve().name
    return Checkpoint(model_id, folder, on_hub, family, config, dtype, _matryoshka(folder, settings))


def _matryoshka(folder: Path, settings: Mapping[str, Any]) -> tuple[int, ...] | None:
    """`Checkpoint.matryoshka`, by the fields that vLLM reads too. Raises CheckpointError."""
    lengths = settings.get("matryoshka_dimensions")
    if not lengths:
        return () if settings.get("is_matryoshka") is True else None
    if not isinstance(lengths, list) or not all(type(each) is int and 0 < each < 1 << 31 for each in lengths):
        raise CheckpointError(f"{folder}: matryoshka_dimensions must be a list of positive integers, got {lengths!r}")
    return tuple(sorted(set(lengths)))


def load_tower(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    adapter: Adapter | None = None,
) -> Loaded:
    """Read the tower's weights, merge an adapter into them, and build it. Raises CheckpointError.

    The tower is built in `dtype` rather than cast to it: casting a built module would round its
    rotary frequencies too.
    """
    fetch = partial(download, checkpoint.model_id) if checkpoint.on_hub else None
    weights = read_weights(checkpoint.folder, checkpoint.family.modules, checkpoint.config, fetch)
    if adapter:
        adapter.merge(checkpoint.family, checkpoint.config, weights)
    transformers.utils.logging.disable_progress_bar()
    parts = {
        name: _built(checkpoint.folder, name, module, checkpoint.config, weights[name], dtype).to(device)
        for name, module in checkpoint.family.modules.items()
    }
    with refused(f"{checkpoint.folder}: the vision tower cannot be built", *BROKEN):
        tower = checkpoint.family.build(parts, checkpoint.config)
    tower.rewrite()
    return Loaded(tower, fingerprint(weights, checkpoint.pooling))


def _built(folder: Path, name: str, module: Module, config: Config, weights: Weights, dtype: torch.dtype) -> nn.Module:
    """A module with its weights, on the host; `config` is the whole checkpoint's. Raises CheckpointError."""
    try:
        own = module.configuration(config)
        if other := _other_form(module, own, weights):
            raise CheckpointError(f"{folder}: the weights do not fit the vision {name}: {other}")
        make = _pretrained if issubclass(module.resolve(), PreTrainedModel) else _plain
        built, info = make(module, own, weights, dtype)
    except BROKEN as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{folder}: the vision {name} cannot be built: {reason}") from error
    wrong = {key: sorted(map(str, keys)) for key, keys in info.items() if keys}
    if wrong:
        listed = "; ".join(f"{key.replace('_', ' ')}: {', '.join(names[:3])}" for key, names in wrong.items())
        raise CheckpointError(f"{folder}: the weights do not fit the vision {name} ({listed})")
    return built.eval().requires_grad_(requires_grad=False)


def _other_form(module: Module, config: Config, weights: Weights) -> str | None:
    """The first weight of another shape or kind than the module holds, found before memory is allocated."""
    with torch.device("meta"):
        held = {name: tuple(tensor.shape) for name, tensor in module.make(config).named_parameters()}
    for name in sorted(held.keys() & weights.keys()):
        given = weights[name]
        if tuple(given.shape) != held[name]:
            return f"{name} is of shape {tuple(given.shape)}, but config.json asks for {held[name]}"
        if not given.is_floating_point():
            return f"{name} is of type {given.dtype}, but must be floating point"
    return None


def _pretrained(
    module: Module, config: Config, weights: Weights, dtype: torch.dtype
) -> tuple[nn.Module, dict[str, Any]]:
    source: Any = module.resolve()  # from_pretrained is typed in part only
    _, *others = module.called_with(config)
    model, info = source.from_pretrained(
        None, *others, config=config, state_dict=dict(weights), dtype=dtype, output_loading_info=True
    )
    return model, {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}


def _plain(module: Module, config: Config, weights: Weights, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """A module that is not a transformers model: its buffers stay in float32, as computed."""
    built = module.make(config)
    for parameter in built.parameters():
        parameter.data = parameter.data.to(dtype)
    info = built.load_state_dict(weights, strict=False)
    return built, {"missing_keys": info.missing_keys, "unexpected_keys": info.unexpected_keys}


def _read_config(folder: Path, settings: Mapping[str, Any], family: Family) -> Config:
    """The configuration of a checkpoint that is supported. Raises CheckpointError."""
    if absurd := absurd_layers(settings):
        raise CheckpointError(f"{folder / 'config.json'}: {absurd}")
    try:
        config = family.read_config(folder, settings)
        problem = next(filter(None, (module.problem(config) for module in family.modules.values())), None)
    except (*BROKEN, OSError, StrictDataclassError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise CheckpointError(f"{folder / 'config.json'} is not a {family.title} configuration: {reason}") from error
    vars(config).pop("quantization_config", None)  # transformers would load the tower through it
    if problem:
        raise CheckpointError(f"{folder / 'config.json'}: unsupported {family.title}: {problem}")
    return config
