"""Adds what the encoder accepted, which has no pixels, to the output of vLLM's processor."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems, VideoProcessorItems
from vllm.multimodal.processing import BaseMultiModalProcessor, ProcessorInputs
from vllm.multimodal.processing.processor import MultiModalProcessingResult

from vitwire.integrations.vllm.files import MediaFile


class References:
    """Wraps a processor's `_cached_apply_hf_processor`, and passes on only the items that are not references."""

    def __init__(self, processor: BaseMultiModalProcessor) -> None:
        self._processor = processor
        self._original = processor._cached_apply_hf_processor  # noqa: SLF001  # it has no other hook

    def apply(self, inputs: ProcessorInputs, timing: object) -> MultiModalProcessingResult:
        """Like vLLM's; the order of images, and of clips, is kept."""
        referred = {
            modality: files
            for modality, items in inputs.mm_data_items.items()
            if isinstance(items, ImageProcessorItems | VideoProcessorItems)
            and (files := {index: file for index, each in enumerate(items.data) if (file := _referred(each))})
        }
        if not referred:
            return self._original(inputs, timing)
        others = {
            modality: [index for index in range(len(inputs.mm_data_items[modality].data)) if index not in files]
            for modality, files in referred.items()
        }
        made = {modality: self._made(modality, list(files.values()), inputs) for modality, files in referred.items()}
        rest = _rest(inputs, others)
        if rest.mm_data_items:
            found = self._original(rest, timing)
        else:
            found = MultiModalProcessingResult(self._processor._postprocess_prompt(inputs.prompt), {}, {}, {})  # noqa: SLF001
        kwargs, hashes, updates = dict(found.kwargs), dict(found.hashes), dict(found.prompt_updates)
        for modality, ours in made.items():
            order = [*referred[modality], *others[modality]]
            theirs = (each.get(modality, ()) for each in (kwargs, hashes, updates))
            kwargs[modality], hashes[modality], placed = map(partial(_placed, order), ours, theirs)
            updates[modality] = [
                [self._processor._recompute_cached_prompt_update(update, index) for update in each]  # noqa: SLF001
                for index, each in enumerate(placed)
            ]
        return found._replace(kwargs=MultiModalKwargsItems(kwargs), hashes=hashes, prompt_updates=updates)

    def _made(
        self, modality: str, files: Sequence[MediaFile], inputs: ProcessorInputs
    ) -> tuple[list[Any], list[str], list[Any]]:
        """The data, hashes and prompt updates of references; no data of those that the engine's cache has."""
        references = [file.reference for file in files if file.reference]
        fields = {name: [each.fields[name] for each in references] for name in references[0].fields}
        configs = {name: MultiModalFieldConfig.batched(modality, keep_on_cpu=True) for name in fields}
        data = MultiModalKwargsItems.from_hf_inputs(fields, configs)
        items = MultiModalDataItems({modality: _items(modality, [file.header for file in files])})
        options = inputs.hf_processor_mm_kwargs
        updates = self._processor._get_mm_prompt_updates(items, options, data)[modality]  # noqa: SLF001
        hashes = [each.content_id for each in references]
        cache = inputs.cache
        if not isinstance(cache, LruKeyReplicatedSenderCache):  # other caches are not used for references
            return list(data[modality]), hashes, list(updates)
        for name in hashes:
            cache.touch_sender_cache_item(name)
        try:
            sent = [
                cache.get_and_update_item(None if cache.is_cached_item(name) else item, name)
                for *item, name in zip(data[modality], updates, hashes, strict=True)
            ]
        finally:
            cache.release_sender_touches()
        return [each for each, _ in sent], hashes, [each for _, each in sent]


def _referred(item: object) -> MediaFile | None:
    """The file of an item that the encoder accepted; None for others. A clip may have its metadata beside it."""
    file = item[0] if isinstance(item, tuple) else item
    return file if isinstance(file, MediaFile) and file.reference else None


def _placed(order: Sequence[int], ours: Sequence[Any], theirs: Sequence[Any]) -> list[Any]:
    """Both together, in the places that `order` has for ours and then for theirs."""
    placed = dict(zip(order, [*ours, *theirs], strict=True))
    return [placed[index] for index in range(len(order))]


def _items(modality: str, data: Sequence[Any], metadata: list[Any] | None = None) -> object:
    return ImageProcessorItems(data) if modality == "image" else VideoProcessorItems(data, metadata)


def _rest(inputs: ProcessorInputs, others: Mapping[str, Sequence[int]]) -> ProcessorInputs:
    """The inputs with only the items at these positions."""
    items, uuids = MultiModalDataItems(inputs.mm_data_items), dict(inputs.mm_uuid_items or {})
    for modality, places in others.items():
        all_of = items.pop(modality)
        if places:
            known = getattr(all_of, "metadata", None)
            metadata = [known[index] for index in places] if isinstance(known, list) else None
            items[modality] = _items(modality, [all_of.data[index] for index in places], metadata)
        if modality in uuids:
            uuids[modality] = [uuids[modality][index] for index in places]
    return replace(inputs, mm_data_items=items, mm_uuid_items=uuids)
