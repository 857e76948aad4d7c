"""Adds images that the encoder accepted, which have no pixels, to the output of vLLM's processor."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
from vllm.multimodal.processing import BaseMultiModalProcessor, ProcessorInputs
from vllm.multimodal.processing.processor import MultiModalProcessingResult

from vitwire.integrations.vllm.files import ImageFile


class References:
    """Wraps a processor's `_cached_apply_hf_processor`, and passes on only the items that are not references."""

    def __init__(self, processor: BaseMultiModalProcessor) -> None:
        self._processor = processor
        self._original = processor._cached_apply_hf_processor  # noqa: SLF001  # it has no other hook

    def apply(self, inputs: ProcessorInputs, timing: object) -> MultiModalProcessingResult:
        """Like vLLM's; the order of images is kept."""
        images = inputs.mm_data_items.get("image")
        files = list(images.data) if isinstance(images, ImageProcessorItems) else []
        referred = [index for index, each in enumerate(files) if isinstance(each, ImageFile) and each.reference]
        if not referred:
            return self._original(inputs, timing)
        others = [index for index in range(len(files)) if index not in set(referred)]
        kwargs, hashes, updates = self._referred([files[index] for index in referred], inputs)
        rest = _rest(inputs, others)
        if rest.mm_data_items:
            found = self._original(rest, timing)
        else:
            found = MultiModalProcessingResult(self._processor._postprocess_prompt(inputs.prompt), {}, {}, {})  # noqa: SLF001
        places = [*referred, *others]

        def ordered(ours: Sequence[Any], theirs: Mapping[str, Any]) -> list[Any]:
            placed = dict(zip(places, [*ours, *theirs.get("image", ())], strict=True))
            return [placed[index] for index in range(len(files))]

        bound = [
            [self._processor._recompute_cached_prompt_update(update, index) for update in each]  # noqa: SLF001
            for index, each in enumerate(ordered(updates, found.prompt_updates))
        ]
        return found._replace(
            kwargs=MultiModalKwargsItems({**found.kwargs, "image": ordered(kwargs, found.kwargs)}),
            hashes={**found.hashes, "image": ordered(hashes, found.hashes)},
            prompt_updates={**found.prompt_updates, "image": bound},
        )

    def _referred(self, files: Sequence[ImageFile], inputs: ProcessorInputs) -> tuple[list[Any], list[str], list[Any]]:
        """The data, hashes and prompt updates of references; no data of those that the engine's cache has."""
        references = [file.reference for file in files if file.reference]
        fields = {name: [each.fields[name] for each in references] for name in references[0].fields}
        configs = {name: MultiModalFieldConfig.batched("image", keep_on_cpu=True) for name in fields}
        data = MultiModalKwargsItems.from_hf_inputs(fields, configs)
        items = MultiModalDataItems({"image": ImageProcessorItems([file.header for file in files])})
        options = inputs.hf_processor_mm_kwargs
        updates = self._processor._get_mm_prompt_updates(items, options, data)["image"]  # noqa: SLF001
        hashes = [each.content_id for each in references]
        cache = inputs.cache
        if not isinstance(cache, LruKeyReplicatedSenderCache):  # other caches are not used for references
            return list(data["image"]), hashes, list(updates)
        for name in hashes:
            cache.touch_sender_cache_item(name)
        try:
            sent = [
                cache.get_and_update_item(None if cache.is_cached_item(name) else item, name)
                for *item, name in zip(data["image"], updates, hashes, strict=True)
            ]
        finally:
            cache.release_sender_touches()
        return [each for each, _ in sent], hashes, [each for _, each in sent]


def _rest(inputs: ProcessorInputs, others: Sequence[int]) -> ProcessorInputs:
    """The inputs with only the images at these positions."""
    items, uuids = MultiModalDataItems(inputs.mm_data_items), dict(inputs.mm_uuid_items or {})
    images = items.pop("image")
    if others:
        items["image"] = ImageProcessorItems([images.data[index] for index in others])
    if "image" in uuids:
        uuids["image"] = [uuids["image"][index] for index in others]
    return replace(inputs, mm_data_items=items, mm_uuid_items=uuids)
