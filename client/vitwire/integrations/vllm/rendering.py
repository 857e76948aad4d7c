"""A renderer for vLLM's front end: uploads images while the prompt is tokenised, and puts references in their place.

It makes the input of every request that vLLM's HTTP server or `LLM` renders: chat completions, responses, messages. It
is also the guard: an engine with our connector would accept embeddings, and ids of cached ones, from any caller.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from functools import cache
from typing import Any, NoReturn

from vllm import envs
from vllm.config import ParallelConfig, VllmConfig
from vllm.config.multimodal import ImageDummyOptions, MultiModalDummyOptions, VideoDummyOptions
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.scale_out.token_in_token_out import serving as token_serving
from vllm.exceptions import RetryableRequestError, VLLMValidationError
from vllm.multimodal.media.connector import MEDIA_CONNECTOR_REGISTRY, global_thread_pool
from vllm.renderers import ChatParams
from vllm.renderers.hf import HfRenderer

from vitwire.errors import InvalidItem
from vitwire.integrations.vllm.choice import Choice
from vitwire.integrations.vllm.connector import VitwireECConnector, expected_width
from vitwire.integrations.vllm.files import ClipFile, FileConnector, MediaFile
from vitwire.integrations.vllm.references import References
from vitwire.integrations.vllm.settings import Settings
from vitwire.integrations.vllm.sizes import CLIPS, MODELS, Sized, may_encode, sized, sized_clip
from vitwire.integrations.vllm.uploads import Declined, Uploads

_log = logging.getLogger("vllm.vitwire")
_DUMMIES = {"image": ImageDummyOptions, "video": VideoDummyOptions}
_WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, InvalidItem)
"""What wrong options of a request raise; vLLM handles its media, and says what is wrong."""
_only_counts: ContextVar[bool] = ContextVar("only_counts", default=False)
"""Whether the request only counts tokens, so that nothing is uploaded."""
_NO_TOWER = "the encoder does not take an image or clip of this request, and this engine has no tower"
_NOT_ALLOWED = (
    "{}: this server takes images as files and URLs, not embeddings, references or uuids of callers "
    "(allow_caller_embeds in --ec-transfer-config)"
)


def renderer_of(config: VllmConfig, tokenizer: object) -> HfRenderer:
    """The renderer of a front end: ours if its engine has our connector, else vLLM's."""
    transfer = config.ec_transfer_config
    if transfer is None or not transfer.ec_connector:
        return HfRenderer(config, tokenizer)
    if not issubclass(ECConnectorFactory.get_connector_class(transfer), VitwireECConnector):
        return HfRenderer(config, tokenizer)
    return VitwireRenderer(config, tokenizer)


class VitwireRenderer(HfRenderer):  # type: ignore[misc]  # vLLM has no type information
    """Uploads images to the encoder; vLLM prepares those that the encoder does not take. Raises ValueError."""

    _uploads: Uploads | None = None
    _choice: Choice | None = None

    def __init__(self, config: VllmConfig, tokenizer: object) -> None:
        settings = Settings.of(config.ec_transfer_config.ec_connector_extra_config)
        servers = config.parallel_config._api_process_count  # noqa: SLF001  # there is no other way
        if servers > 1 and not settings.content_key_file:
            raise ValueError(
                "ec_connector_extra_config.content_key_file: several API servers need one secret for the ids of "
                "images: openssl rand -hex 32 > FILE"
            )
        super().__init__(_for_front_end(config, takes_embeds=settings.allow_caller_embeds), tokenizer)
        self._allows_uuids = settings.allow_caller_embeds
        limit = config.model_config.multimodal_config.get_limit_per_prompt
        self._has_tower = any(limit(each) > 0 for each in _DUMMIES)
        self._takes_clips = config.model_config.hf_config.model_type in CLIPS
        _hook(allow_features=settings.allow_caller_embeds)
        processor = self.mm_processor
        if processor and config.model_config.hf_config.model_type in MODELS:
            processor._cached_apply_hf_processor = References(processor).apply  # noqa: SLF001  # it has no other hook
            if self._has_tower and settings.fallback == "faster":
                self._choice = Choice(servers / _engines(config.parallel_config))
            self._uploads = Uploads(settings, expected_width(config), self._choice)

    # -- messages to prompts: uploads begin ----------------------------------------------------------

    def render_chat(self, *arguments: object, skip_mm_cache: bool = False, **named: object) -> object:
        with _counting(skip_mm_cache):
            return super().render_chat(*arguments, skip_mm_cache=skip_mm_cache, **named)

    async def render_chat_async(self, *arguments: object, skip_mm_cache: bool = False, **named: object) -> object:
        with _counting(skip_mm_cache):
            return await super().render_chat_async(*arguments, skip_mm_cache=skip_mm_cache, **named)

    def render_messages(self, messages: list[Any], params: ChatParams) -> tuple[list[Any], dict[str, Any]]:
        conversation, prompt = super().render_messages(messages, params)
        self._begin(prompt, params.mm_processor_kwargs)
        return conversation, prompt

    async def render_messages_async(self, messages: list[Any], params: ChatParams) -> tuple[list[Any], dict[str, Any]]:
        conversation, prompt = await super().render_messages_async(messages, params)
        self._begin(prompt, params.mm_processor_kwargs)
        return conversation, prompt

    def _begin(self, prompt: Mapping[str, Any], options: Mapping[str, object] | None) -> None:
        """Begin to upload the images and clips of a prompt, which is tokenised meanwhile."""
        if self._uploads is None or _only_counts.get():
            return
        for file in (each for _, _, each in _files(prompt) if each.upload is None):
            try:
                found = self._sized(file, options or {})
            except _WRONG:
                found = None
            file.tokens = found.tokens if found else 0
            file.upload = self._uploads.begin(file.original_bytes, file.modality, found)

    def _sized(self, file: MediaFile, options: Mapping[str, object]) -> Sized | None:
        info = self.mm_processor.info
        if isinstance(file, ClipFile):
            return sized_clip(info, file, options) if self._takes_clips else None
        return sized(info, file.size, options) if may_encode(info, options) else None

    # -- prompts to inputs of the engine: images become references, or are decoded --------------------

    def _process_tokens(self, prompt: dict[str, Any], *, skip_mm_cache: bool = False) -> object:
        self._check(prompt, skip_mm_cache=skip_mm_cache)
        for items, index, file in _files(prompt):
            with self._declining(file):
                file.reference = file.upload.result() if file.upload else None
            items[index] = _settled(file) or file.decoded()
        return super()._process_tokens(prompt, skip_mm_cache=skip_mm_cache)

    async def _process_tokens_async(self, prompt: dict[str, Any], *, skip_mm_cache: bool = False) -> object:
        self._check(prompt, skip_mm_cache=skip_mm_cache)
        files = list(_files(prompt))
        await asyncio.gather(*(self._settle(items, index, file) for items, index, file in files))
        began = time.monotonic()
        found = await super()._process_tokens_async(prompt, skip_mm_cache=skip_mm_cache)
        own = [file for _, _, file in files if file.tokens and not file.reference]
        if own and self._choice:
            seconds = time.monotonic() - began + max(file.decoding for file in own)
            self._choice.prepared(own[0].modality, seconds, sum(file.tokens for file in own))
        return found

    def _check(self, prompt: dict[str, Any], *, skip_mm_cache: bool) -> None:
        """Begin uploads that no message began. Raises VLLMValidationError for a uuid without an image."""
        if not self._allows_uuids and prompt.pop("multi_modal_uuids", None):
            for modality, items in (prompt.get("multi_modal_data") or {}).items():
                if items is None or (isinstance(items, Sequence) and any(each is None for each in items)):
                    raise VLLMValidationError(_NOT_ALLOWED.format(modality), parameter="uuid")
        if skip_mm_cache:
            return
        self._begin(prompt, prompt.get("mm_processor_kwargs"))
        known = {id(each) for _, _, each in _files(prompt)}
        if not self._has_tower and any(id(each) not in known for items in _media(prompt) for each in items):
            text = "JPEG, PNG, WebP, GIF, BMP, MP4 and WebM, without options of the decoder"
            raise VLLMValidationError(f"{_NO_TOWER}; the encoder takes {text}", parameter="image or video")

    async def _settle(self, items: list[Any], index: int, file: MediaFile) -> None:
        with self._declining(file):
            file.reference = await asyncio.wrap_future(file.upload) if file.upload else None
        loop, began = asyncio.get_running_loop(), time.monotonic()
        items[index] = _settled(file) or await loop.run_in_executor(global_thread_pool, file.decoded)
        file.decoding = time.monotonic() - began

    @contextmanager
    def _declining(self, file: MediaFile) -> Iterator[None]:
        """What the encoder does not take is the tower's. Without one, raises RetryableRequestError and ValueError."""
        try:
            yield
        except Declined as reason:
            if self._has_tower:
                return
            if str(reason) in Declined.PASSING:
                raise RetryableRequestError(f"the encoder is {reason}, and this engine has no tower; retry") from None
            raise VLLMValidationError(f"{_NO_TOWER} ({reason})", parameter=file.modality) from None


def _engines(parallel: ParallelConfig) -> int:
    """Those that the front ends give requests to: behind an outer load balancer only the node's."""
    return int(parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size)


def _media(prompt: Mapping[str, Any]) -> list[list[Any]]:
    """The images and the clips of a prompt, in the lists in which they can be replaced."""
    data = prompt.get("multi_modal_data") or {}
    return [data[each] for each in _DUMMIES if isinstance(data.get(each), list)]


def _files(prompt: Mapping[str, Any]) -> Iterator[tuple[list[Any], int, MediaFile]]:
    """The images and clips that came as files, each with the list that it is in, and its place."""
    for items in _media(prompt):
        yield from [(items, index, each) for index, each in enumerate(items) if isinstance(each, MediaFile)]


def _settled(file: MediaFile) -> object:
    """What vLLM's parser gets of an accepted file; None for others."""
    if file.reference is None:
        return None
    return file.header if isinstance(file, ClipFile) else file


@contextmanager
def _counting(only_counts: bool) -> Iterator[None]:
    """While the block runs, upload nothing if the request only counts tokens."""
    token = _only_counts.set(only_counts or _only_counts.get())
    try:
        yield
    finally:
        _only_counts.reset(token)


def _for_front_end(config: VllmConfig, *, takes_embeds: bool) -> VllmConfig:
    """The configuration of a front end, which takes images also for an engine without a tower; the engine's stays."""
    found = copy(config)
    found.model_config = copy(config.model_config)
    found.model_config.multimodal_config = multimodal = copy(config.model_config.multimodal_config)
    multimodal.enable_mm_embeds = multimodal.allow_missing_mm_embeddings = takes_embeds
    kind = config.model_config.hf_config.model_type
    taken = {name: made() for name, made in _DUMMIES.items() if kind in {"image": MODELS, "video": CLIPS}[name]}
    if taken and not any(multimodal.get_limit_per_prompt(each) for each in _DUMMIES):
        multimodal.language_model_only = False
        multimodal.limit_per_prompt = MultiModalDummyOptions(multimodal.limit_per_prompt | taken)
    return found


@cache
def _hook(*, allow_features: bool) -> None:
    """Patch the parts of vLLM's HTTP server that have no extension point."""
    if envs.VLLM_MEDIA_CONNECTOR == "http":
        MEDIA_CONNECTOR_REGISTRY.name2class["http"] = FileConnector
    else:
        text = "VLLM_MEDIA_CONNECTOR=%s decodes images itself, so none reaches the encoder; unset it"
        _log.error(text, envs.VLLM_MEDIA_CONNECTOR)
    if not allow_features:
        token_serving.mm_kwargs_from_features = _refuse_features
    GenerateBaseServing._raise_if_error = _raise_if_error  # noqa: SLF001  # the only place that names its error
    counted = AnthropicServingMessages.count_tokens

    async def count_tokens(*arguments: object, **named: object) -> object:
        with _counting(True):
            return await counted(*arguments, **named)

    AnthropicServingMessages.count_tokens = count_tokens


def _refuse_features(_: object) -> NoReturn:
    raise VLLMValidationError(_NOT_ALLOWED.format("features"), parameter="features")


def _raise_if_error(_: object, finish_reason: str | None, request_id: str) -> None:
    """Like vLLM's, but with status 503, so that the client may retry."""
    if finish_reason == "error":
        _log.error("request %s failed in the engine", request_id)
        raise RetryableRequestError("the engine could not get an image or clip of the request, or failed; please retry")
