"""vLLM's tower as its V2 model runner drives it: eagerly, in graphs of its default budgets, and of exact ones."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import vllm
from bench.commands import Row
from bench.engine.checkpoint import SPECIAL
from bench.engine.loads import Size
from bench.engine.serving import ENVIRONMENT, free_port
from bench.engine.towers.answering import Tower, answering
from PIL import Image
from torch import Tensor
from transformers import BatchFeature
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

Items = list[tuple[str, Any]]
_ARGUMENTS: dict[str, Any] = {
    "mm_encoder_only": True,
    "dtype": "bfloat16",
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 64,
    "gpu_memory_utilization": 0.5,
    "enable_prefix_caching": False,
    "mm_processor_cache_gb": 0,
    "skip_mm_profiling": True,
    "compilation_config": {"cudagraph_mm_encoder": True},
}
"""Nothing is reused between calls."""
_IMAGE = [SPECIAL["<|vision_start|>"], SPECIAL["<|image_pad|>"], SPECIAL["<|vision_end|>"]]
"""Tokens that stand for an image."""


class Graphs(EncoderCudaGraphManager):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Notes the graphs that it replays."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.replayed: list[Any] = []

    def _run_budget_graph(self, mm_kwargs: Any, token_budget: int, path: str = "default", axis_keys: Any = ()) -> Any:
        output = super()._run_budget_graph(mm_kwargs, token_budget, path, axis_keys)
        if output is not None:
            self.replayed.append(self.budget_graphs[path][token_budget])
        return output


class VllmTower(Tower):
    """The checkpoint's tower, without the language model."""

    def __init__(self, job: Row) -> None:
        sizes = [Size(*each) for each in job["sizes"]]
        most, clips = max(size.images for size in sizes), any(size.frames > 1 for size in sizes)
        limits = {"image": max(4, most), "video": int(clips)}
        config = EngineArgs(job["model"], limit_mm_per_prompt=limits, **_ARGUMENTS).create_engine_config()
        self.device = torch.device("cuda:0" if current_platform.is_cuda() else "cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, current_platform.dist_backend)
            ensure_model_parallel_initialized(1, 1)
            self._model: Any = get_model(vllm_config=config)
            self._runners = {"vllm_eager": self._runner(config), "vllm_graph": self._runner(config, [])}
            if clips:  # as vLLM serves videos: all of its graphs have room for their frames
                self._runners["vllm_graph clip"] = self._runner(config, [], frames=None)
            # Each has one budget: with several, vLLM prefers many replays of small ones to one of a large one.
            self._exact = {size: self._exact_runner(config, size) for size in sizes}
        self._front = InputProcessor(config)

        visual, default = self._model.visual, self._runners["vllm_graph"].cudagraph_manager
        flash = getattr(visual.blocks[0].attn.attn, "_fa_version", None)
        self.described = {
            "engine": f"vLLM {vllm.__version__}",
            "device": current_platform.get_device_name(),
            "vllm_attention": f"{visual.attn_backend}" + (f" {flash}" if flash else ""),
            "vllm_budgets": default.token_budgets if default else [],
        }

    def encode(self, column: str, pictures: Sequence[Any]) -> Tensor:
        return torch.cat(self.call(column, pictures)())

    @torch.inference_mode()
    def replayed(self, column: str, pictures: Sequence[Any]) -> Callable[[], object]:
        items, runner = self._items(pictures), self._chosen(column, pictures)
        if manager := runner.cudagraph_manager:
            assert isinstance(manager, Graphs)
            manager.replayed.clear()
            runner.execute_mm_encoder(items)
            if graphs := list(manager.replayed):
                return torch.inference_mode()(lambda: [each.graph.replay() for each in graphs])
        batches = list(group_and_batch_mm_kwargs(items, device=self.device, pin_memory=PIN_MEMORY))
        return torch.inference_mode()(lambda: [self._model.embed_multimodal(**each) for _, _, each in batches])

    def call(self, column: str, pictures: Sequence[Any]) -> Callable[[], Any]:
        return partial(self._chosen(column, pictures).execute_mm_encoder, self._items(pictures))

    def _chosen(self, column: str, pictures: Sequence[Any]) -> EncoderRunner:
        first = pictures[0]
        clip = isinstance(first, np.ndarray)
        if column == "vllm_exact":
            return self._exact[Size(first.shape[1], frames=len(first)) if clip else Size(first.width, len(pictures))]
        return self._runners[f"{column} clip" if clip and column == "vllm_graph" else column]

    def _items(self, pictures: Sequence[Any]) -> Items:
        """What vLLM's processor makes of them."""
        if isinstance(pictures[0], np.ndarray):
            return [("video", self._clip(pictures[0]))]
        prompt = {"prompt_token_ids": _IMAGE * len(pictures), "multi_modal_data": {"image": list(pictures)}}
        (rendered,) = self._front.renderer.render_cmpl([prompt])
        return [("image", each) for each in rendered["mm_kwargs"]["image"]]

    def _clip(self, frames: Any) -> Any:
        """Made of its frames as images, whose patches have each frame twice: each pair of frames shares them."""
        images = [self._items([Image.fromarray(frame)])[0][1] for frame in frames]
        pixels = torch.stack([each["pixel_values"].data for each in images]).unflatten(-1, (3, 2, -1))
        pairs = torch.stack([pixels[::2, ..., 0, :], pixels[1::2, ..., 1, :]], dim=-2).flatten(-3).flatten(0, 1)
        grid = images[0]["image_grid_thw"].data.clone()
        grid[0] = len(frames) // 2
        fields = {
            "pixel_values_videos": MultiModalFieldConfig.flat_from_sizes("video", torch.tensor([len(pairs)])),
            "video_grid_thw": MultiModalFieldConfig.batched("video"),
        }
        inputs = BatchFeature({"pixel_values_videos": pairs, "video_grid_thw": grid[None]})
        return MultiModalKwargsItems.from_hf_inputs(inputs, fields)["video"][0]

    def _exact_runner(self, config: VllmConfig, size: Size) -> EncoderRunner:
        """With one graph, of exactly this size. Two frames of a clip share their tokens."""
        pairs = size.frames // 2
        return self._runner(config, [(size.side // 32) ** 2 * size.images * max(1, pairs)], size.images, frames=pairs)

    def _runner(
        self, config: VllmConfig, budgets: list[int] | None = None, items: int = 0, frames: int | None = 0
    ) -> EncoderRunner:
        """budgets, items, frames: of its graphs, and the most of a batch; [], 0 and None leave it to vLLM.

        Graphs of 0 frames are for images. There are none without `budgets`.
        """
        dtype, manager = config.model_config.dtype, None
        if budgets is not None:
            compilation = config.compilation_config
            compilation.encoder_cudagraph_token_budgets = budgets
            compilation.encoder_cudagraph_max_vision_items_per_batch = items
            compilation.encoder_cudagraph_max_frames_per_batch = frames
            manager = Graphs(config, self.device, dtype, self._model)
        width = config.model_config.get_inputs_embeds_size()
        runner = EncoderRunner(self._model, 1, width, EncoderCache(), dtype, self.device, manager)
        if manager:
            runner.capture()
        return runner


if __name__ == "__main__":
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    answering(VllmTower)
