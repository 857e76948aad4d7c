"""The EC connector that vLLM loads: fetches embeddings of images that its front end, or a router, gave to Vitwire.

vLLM makes one in the scheduler's process, which decides what is fetched, loaded and dropped (`table.py`), and one in
each worker, which does it (`worker.py`). Orders travel with each step's metadata, outcomes with its output; both are
passed on in steps without tokens too, by vLLM's model runner V2. A worker in the scheduler's process (one device) is
asked directly: the output of a step comes after its forward, and with asynchronous scheduling after the next schedule.
"""

import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.platforms import current_platform
from vllm.tokenizers.registry import tokenizer_args_from_config

from vitwire.integrations.vllm.plugin import VERSIONS, is_registered
from vitwire.integrations.vllm.settings import Settings
from vitwire.integrations.vllm.stats import VitwireECPromMetrics, VitwireECStats
from vitwire.integrations.vllm.table import FILE, OPTIONS, Content, Order, Outcome, Step, Table
from vitwire.integrations.vllm.tower import take_times, time_tower
from vitwire.integrations.vllm.worker import Expected, Fetcher
from vitwire.items import Modality

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

_NEEDED = ("ensure_cache_available", "take_unavailable_requests", "build_connector_worker_meta")
_STEP_WAIT_SECONDS = 0.004
"""Most seconds that a step waits for fetches, over all its requests; a step of a 2B model takes about as long."""
_UNKNOWN = (0, 0, 0)
_MODALITIES: tuple[Modality, ...] = ("image", "video")


@dataclass
class VitwireECMetadata(ECConnectorMetadata):  # type: ignore[misc]  # vLLM has no type information
    """From the scheduler to the workers."""

    step: Step


@dataclass
class VitwireECWorkerMetadata(ECConnectorWorkerMetadata):  # type: ignore[misc]  # as above
    """From the workers to the scheduler: outcomes by number of the fetch, one for each worker."""

    outcomes: dict[int, list[Outcome]]

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "VitwireECWorkerMetadata":
        assert isinstance(other, VitwireECWorkerMetadata)
        for number, outcomes in other.outcomes.items():
            self.outcomes.setdefault(number, []).extend(outcomes)
        return self


class VitwireECConnector(ECConnectorBase):  # type: ignore[misc]  # as above
    """Consumer of embeddings that a Vitwire server has cached, under ids of vLLM's front end or of the request.

    Takes the items without pixels and without embeddings; vLLM encodes others itself. Raises ValueError for settings,
    versions and features of vLLM that it cannot work with.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        settings = Settings.of(vllm_config.ec_transfer_config.ec_connector_extra_config)
        _check(vllm_config, settings)
        self._table = Table(
            held_tokens=settings.held_tokens or vllm_config.scheduler_config.encoder_cache_size,
            workers=(workers := _reporting_workers(vllm_config)),
            seconds=2 * (settings.timeout + settings.wait),
        )
        limit = vllm_config.model_config.multimodal_config.get_limit_per_prompt
        self._no_tower = [each for each in _MODALITIES if limit(each) == 0]
        self._is_single = workers == 1
        self._wait_left = _STEP_WAIT_SECONDS
        self._fetcher = Fetcher(settings, _expected(vllm_config)) if role is ECConnectorRole.WORKER else None
        if self._fetcher and settings.fallback == "faster":
            time_tower()

    def shutdown(self) -> None:
        if self._fetcher:
            self._fetcher.close()

    # -- workers -----------------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: MutableMapping[str, torch.Tensor], **_: object) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, VitwireECMetadata)
        assert self._fetcher is not None
        self._fetcher.follow(metadata.step, encoder_cache)

    def save_caches(self, encoder_cache: MutableMapping[str, torch.Tensor], mm_hash: str, **_: object) -> None:
        """Nothing: a consumer."""

    def build_connector_worker_meta(self) -> VitwireECWorkerMetadata | None:
        outcomes = self.take_outcomes()
        return VitwireECWorkerMetadata(outcomes) if outcomes else None

    def begin(self, fetches: list[Order]) -> None:
        """Begin to fetch, for a scheduler in this process."""
        assert self._fetcher is not None
        self._fetcher.begin(fetches)

    def take_outcomes(self, wait: float = 0.0) -> dict[int, list[Outcome]]:
        """Fetches that ended since the last call. wait: seconds to wait for one if none has ended."""
        assert self._fetcher is not None
        return self._fetcher.take_outcomes(wait)

    # -- scheduler ---------------------------------------------------------------------------------

    def ensure_cache_available(self, request: "Request", num_computed_tokens: int) -> bool:
        worker = _worker_of_this_process() if self._is_single else None
        if worker is not None:
            self._report(worker.take_outcomes())
        ends = [each.mm_position.offset + each.mm_position.length for each in request.mm_features]
        contents = _contents(request) if max(ends) > num_computed_tokens else {}  # most steps decode
        needed, passed = [], []
        for index, feature in enumerate(request.mm_features):
            if ends[index] <= num_computed_tokens:
                passed.append(feature.identifier)
            elif index in contents:
                needed.append(contents[index])
            elif feature.modality in self._no_tower and any("pixel_values" in each for each in feature.data or ()):
                self._table.refuse(request.request_id)  # a tower that is not there would end the engine
        still = {content.identifier for content in needed}
        self._table.release(request.request_id, (each for each in passed if each not in still))
        ensure = partial(self._table.ensure, request.request_id, needed, urgent=num_computed_tokens > 0)
        if ensure(time.monotonic()):
            return True
        return worker is not None and self._awaits(worker, needed) and ensure(time.monotonic())

    def _awaits(self, worker: "VitwireECConnector", contents: list[Content]) -> bool:
        """Begin the fetches in this thread, and wait for those that usually end before the step's time for it does.

        The device works on the previous step meanwhile. Returns whether none of them is being fetched any more.
        """
        worker.begin(self._table.take_fetches())
        start = time.monotonic()
        end = start + self._wait_left
        now = start
        while (remaining := self._table.remaining(contents, now)) is not None and now + remaining < end:
            self._report(worker.take_outcomes(end - now))
            now = time.monotonic()
        self._wait_left -= now - start
        return remaining is None

    def has_cache_item(self, identifier: str) -> bool:
        return self._table.has(identifier)

    def update_state_after_alloc(self, request: "Request", index: int) -> None:
        self._table.allocated(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> VitwireECMetadata:
        self._wait_left = _STEP_WAIT_SECONDS
        return VitwireECMetadata(self._table.take_step(scheduler_output.free_encoder_mm_hashes))

    def update_connector_output(self, connector_output: "ECConnectorOutput") -> None:
        metadata = connector_output.ec_connector_worker_meta
        if isinstance(metadata, VitwireECWorkerMetadata):
            self._report(metadata.outcomes)

    def _report(self, outcomes: dict[int, list[Outcome]]) -> None:
        for number, each in outcomes.items():
            self._table.reported(number, each)

    def take_unavailable_requests(self) -> set[str]:
        return self._table.take_failed()

    def request_finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        self._table.finished(request.request_id, [each.identifier for each in request.mm_features])
        return False, None

    # -- statistics --------------------------------------------------------------------------------

    def get_ec_connector_stats(self) -> VitwireECStats | None:
        """The workers' outcomes are counted by the scheduler; they count the times of their tower."""
        stats = VitwireECStats(take_times() if self._fetcher else self._table.take_counts())
        return None if stats.is_empty() else stats

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> VitwireECStats:
        return VitwireECStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> VitwireECPromMetrics:  # noqa: ANN401  # vLLM's
        return VitwireECPromMetrics(*arguments, **named)


def _worker_of_this_process() -> VitwireECConnector | None:
    """The worker's connector, whose methods vLLM calls in the scheduler's thread; None if workers are processes."""
    worker = get_ec_transfer() if has_ec_transfer() else None
    return worker if isinstance(worker, VitwireECConnector) else None


def _check(vllm_config: VllmConfig, settings: Settings) -> None:
    """Raises ValueError for a version or features of vLLM that the connector cannot work with."""
    if missing := [name for name in _NEEDED if not hasattr(ECConnectorBase, name)]:
        raise ValueError(f"VitwireECConnector needs vLLM 0.33 or newer: this one has no {', '.join(missing)}")
    if vllm_config.ec_transfer_config.ec_role != "ec_consumer":
        raise ValueError(
            f"VitwireECConnector: ec_role must be ec_consumer, not {vllm_config.ec_transfer_config.ec_role}"
        )
    if not vllm_config.use_v2_model_runner:
        raise ValueError(
            "VitwireECConnector needs vLLM's model runner V2, as V1 does not call connectors in steps without tokens: "
            "set VLLM_USE_V2_MODEL_RUNNER=1"
        )
    if not settings.allow_caller_embeds:
        _check_front_end(vllm_config)
    if vllm_config.model_config.runner_type == "pooling":
        raise ValueError("VitwireECConnector: an embedding that is lost would end vLLM 0.33's API server for pooling")
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None:
        raise ValueError(f"VitwireECConnector: {vllm_config.model_config.model} takes no images")
    if _levels(vllm_config) and not any(multimodal.get_limit_per_prompt(each) for each in _MODALITIES):
        raise ValueError(
            "VitwireECConnector: this model has deepstack levels, which vLLM drops with the tower: do not set "
            "--limit-mm-per-prompt to 0 for both images and videos"
        )
    if getattr(multimodal, "video_pruning_rate", None):
        raise ValueError("VitwireECConnector: --video-pruning-rate changes embeddings in the worker; turn it off")
    if vllm_config.lora_config and getattr(vllm_config.lora_config, "enable_tower_connector_lora", False):
        raise ValueError("VitwireECConnector: vLLM would apply tower LoRAs that Vitwire does not; turn them off")


def _check_front_end(vllm_config: VllmConfig) -> None:
    """Raises ValueError if vLLM's front end would pass on embeddings of callers to the engine."""
    reason = ""
    if envs.VLLM_USE_RUST_FRONTEND:
        reason = "the Rust front end loads no plugins: unset VLLM_USE_RUST_FRONTEND"
    elif not is_registered():
        reason = (
            f"vLLM's front end is not hooked: install Vitwire as a package, leave `vitwire` in VLLM_PLUGINS, and use "
            f"vLLM {' or '.join(VERSIONS)}"
        )
    elif (mode := tokenizer_args_from_config(vllm_config.model_config)[0]) != "hf":
        reason = f"vLLM's front end for {mode!r} models is not hooked"
    if reason:
        raise ValueError(
            f"VitwireECConnector: {reason}. If no stranger reaches vLLM's port, such as behind `vitwire router`, set "
            "ec_connector_extra_config.allow_caller_embeds to true instead"
        )


def _reporting_workers(vllm_config: VllmConfig) -> int:
    """Workers whose outcomes reach the scheduler: those of the first pipeline stage, where all outputs are merged."""
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher":
        raise ValueError("VitwireECConnector: ranks of external_launcher would schedule differently; use mp")
    if parallel.distributed_executor_backend not in ("mp", "ray"):
        return 1
    return int(parallel.tensor_parallel_size) * int(getattr(parallel, "prefill_context_parallel_size", 1))


def _levels(vllm_config: VllmConfig) -> int:
    config = vllm_config.model_config.hf_config
    vision = getattr(config, "vision_config", None) or getattr(
        getattr(config, "thinker_config", None), "vision_config", None
    )
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def expected_width(vllm_config: VllmConfig) -> int:
    """Columns of an embedding that the language model takes, deepstack levels included."""
    return int(vllm_config.model_config.get_inputs_embeds_size()) * (1 + _levels(vllm_config))


def _expected(vllm_config: VllmConfig) -> Expected:
    kind = current_platform.device_type or "cpu"
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    return Expected(expected_width(vllm_config), vllm_config.model_config.dtype, device)


def _contents(request: "Request") -> dict[int, Content]:
    """The contents to fetch, by the index of the feature; vLLM encodes the others itself.

    Each is cached under its uuid. vLLM replaces uuids by hashes if media or processor options are set, so a request
    repeats them in `ec_transfer_params`: `{"content_ids": [...]}`, in order. They belong to its last references: those
    of earlier turns, which vLLM keeps, come first.
    """
    contents = {}
    grids = {index: grid for index, each in enumerate(request.mm_features) if (grid := _grid(each))}
    for index, each in enumerate(request.mm_features):
        if each.data and FILE in each.data:  # made by our renderer, which also chose the id
            grid, rows = grids.pop(index, _UNKNOWN), request.get_num_encoder_embeds(index)
            modality, file = _MODALITIES[each.modality == "video"], each.data[FILE].data
            file = file if file.numel() else None
            options = each.data[OPTIONS].data
            contents[index] = Content(each.identifier, str(each.mm_hash), modality, grid, rows, file, options)
    params = request.ec_transfer_params
    ids = params.get("content_ids") if isinstance(params, dict) else None
    if not isinstance(ids, list) or len(ids) > len(grids) or not all(isinstance(each, str) for each in ids):
        ids = []
    for number, (index, grid) in enumerate(grids.items(), len(ids) - len(grids)):
        feature = request.mm_features[index]
        own = str(feature.mm_hash or feature.identifier)
        content_id = own if number < 0 or own in ids else ids[number]
        modality, rows = _MODALITIES[feature.modality == "video"], request.get_num_encoder_embeds(index)
        contents[index] = Content(feature.identifier, content_id, modality, grid, rows)
    return contents


def _grid(feature: "MultiModalFeatureSpec") -> tuple[int, int, int] | None:
    """The grid of an image or clip that comes without pixels and rows; None for others."""
    name = f"{feature.modality}_grid_thw"
    if feature.modality not in _MODALITIES or not feature.data or name not in feature.data:
        return None
    if any("pixel_values" in each or each.endswith("_embeds") for each in feature.data):
        return None
    t, h, w = feature.data[name].data.flatten().tolist()
    return t, h, w
