"""vLLM's tower as its V2 model runner drives it: eagerly, in graphs of its default budgets, and of exact ones."""

import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench.engine import vllm_engine
from bench.engine.requests import image_tokens
from bench.engine.towers.answering import Row, Tower, answering
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

Items = list[tuple[str, Any]]


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
        most = max(images for _, images in job["sizes"])
        chosen = vllm_engine.arguments(Path(job["model"]), "", images=max(4, most)) | {"mm_encoder_only": True}
        config = EngineArgs(**chosen).create_engine_config()
        self.device = torch.device("cuda:0" if current_platform.is_cuda() else "cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{_free_port()}", 0, current_platform.dist_backend)
            ensure_model_parallel_initialized(1, 1)
            self._model: Any = get_model(vllm_config=config)
            self._runners = {"vllm_eager": self._runner(config), "vllm_graph": self._runner(config, [])}
            # Each has one budget: with several, vLLM prefers many replays of small ones to one of a large one.
            self._exact = {
                (side, images): self._runner(config, [(side // 32) ** 2 * images], images)
                for side, images in job["sizes"]
            }
        self._front = InputProcessor(config)

    def described(self) -> Row:
        visual = self._model.visual
        default = self._runners["vllm_graph"].cudagraph_manager
        flash = getattr(visual.blocks[0].attn.attn, "_fa_version", None)
        return vllm_engine.described() | {
            "vllm_attention": f"{visual.attn_backend}" + (f" {flash}" if flash else ""),
            "vllm_budgets": default.token_budgets if default else [],
        }

    def encode(self, column: str, pictures: Sequence[Any]) -> Tensor:
        return torch.cat(self.call(column, pictures)())

    @torch.inference_mode()
    def replayed(self, column: str, pictures: Sequence[Any]) -> tuple[Callable[[], object], Sequence[int]]:
        items, runner = self._items(pictures), self._chosen(column, pictures)
        if manager := runner.cudagraph_manager:
            assert isinstance(manager, Graphs)
            manager.replayed.clear()
            runner.execute_mm_encoder(items)
            graphs = list(manager.replayed)
            if not graphs:
                raise RuntimeError("no graph of this size")
            replay = torch.inference_mode()(lambda: [each.graph.replay() for each in graphs])
            return replay, [each.token_budget for each in graphs]
        batches = list(group_and_batch_mm_kwargs(items, device=self.device, pin_memory=PIN_MEMORY))
        forward = torch.inference_mode()(lambda: [self._model.embed_multimodal(**each) for _, _, each in batches])
        return forward, []

    def call(self, column: str, pictures: Sequence[Any]) -> Callable[[], Any]:
        return partial(self._chosen(column, pictures).execute_mm_encoder, self._items(pictures))

    def _chosen(self, column: str, pictures: Sequence[Any]) -> EncoderRunner:
        return self._exact[pictures[0].width, len(pictures)] if column == "vllm_exact" else self._runners[column]

    def _items(self, pictures: Sequence[Any]) -> Items:
        """What vLLM's processor makes of them."""
        prompt = {"prompt_token_ids": image_tokens(len(pictures)), "multi_modal_data": {"image": list(pictures)}}
        (rendered,) = self._front.renderer.render_cmpl([prompt])
        return [("image", each) for each in rendered["mm_kwargs"]["image"]]

    def _runner(self, config: VllmConfig, budgets: list[int] | None = None, items: int = 0) -> EncoderRunner:
        """budgets, items: of its graphs, and the most of a batch; [] and 0 leave it to vLLM. No graphs with None."""
        dtype, manager = config.model_config.dtype, None
        if budgets is not None:
            compilation = config.compilation_config
            compilation.encoder_cudagraph_token_budgets = budgets
            compilation.encoder_cudagraph_max_vision_items_per_batch = items
            manager = Graphs(config, self.device, dtype, self._model)
        width = config.model_config.get_inputs_embeds_size()
        runner = EncoderRunner(self._model, 1, width, EncoderCache(), dtype, self.device, manager)
        if manager:
            runner.capture()
        return runner


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


if __name__ == "__main__":
    os.environ.update({name: value for name, value in vllm_engine.ENVIRONMENT.items() if name not in os.environ})
    answering(VllmTower)
