"""vLLM's AsyncLLM around the engine of `engine.py`, which runs in this process and has a tower of ones."""

import asyncio
import contextlib
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from bench.engine.serving import free_port
from tests.engines.vllm.engine import Engine
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.model_executor.model_loader import get_model
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.outputs import LogprobsLists


class WithTower(Engine):
    """Keeps the outputs of its steps for the front end."""

    def __init__(self, config: Any, blocks: int = 256) -> None:
        super().__init__(config, InputProcessor(config), blocks)
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.encoded: list[str] = []
        """Images that the engine's tower encoded."""

    def _execute(self, scheduled: Any) -> Any:
        requests = {new.req_id: new.mm_features for new in scheduled.scheduled_new_reqs}
        for name, indices in scheduled.scheduled_encoder_inputs.items():
            for feature in (requests.get(name, self.request(name).mm_features)[index] for index in indices):
                self.cache.encoder_outputs[feature.identifier] = self._rows(feature)
        return super()._execute(replace(scheduled, scheduled_encoder_inputs={}))

    def _rows(self, feature: Any) -> torch.Tensor:
        """As the model does, which takes embeddings as they are."""
        if "image_embeds" in feature.data:
            rows: torch.Tensor = feature.data["image_embeds"].data
            return rows
        self.encoded.append(feature.identifier)
        vision = self.config.model_config.hf_config.vision_config
        width = vision.out_hidden_size * (1 + len(vision.deepstack_visual_indexes))
        return torch.ones(feature.mm_position.length, width, dtype=torch.bfloat16)

    def _update(self, outputs: Any) -> None:
        super()._update(outputs)
        for each in outputs.values():
            self.outputs.put_nowait(each)


class WithVllmTower(WithTower):
    """Its tower is vLLM's, and the log probabilities of a token are a projection of the prompt's rows."""

    def __init__(self, config: Any, blocks: int = 256) -> None:
        super().__init__(config, blocks)
        torch.accelerator.empty_cache = lambda: None  # which needs one
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            self.runner.model = get_model(vllm_config=config)

    @torch.inference_mode()
    def _rows(self, feature: Any) -> torch.Tensor:
        self.encoded.append(feature.identifier)
        return self.runner.execute_mm_encoder([(feature.modality, feature.data)])[0]

    def _execute(self, scheduled: Any) -> Any:
        output = super()._execute(scheduled)
        if not output.req_ids:
            return output
        found = [_likely(self.gathered.get(name) or [torch.zeros(1, 1)]) for name in output.req_ids]
        ids, logprobs = (torch.stack(each).numpy() for each in zip(*found, strict=True))
        sampled = [row[:1].tolist() if had else [] for row, had in zip(ids, output.sampled_token_ids, strict=True)]
        return replace(output, sampled_token_ids=sampled, logprobs=LogprobsLists(ids, logprobs, ids[:, 0]))


def _likely(gathered: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log probabilities. The first is the sampled one, which is the most likely."""
    rows = torch.cat(gathered).float()
    matrix = torch.randn(rows.shape[1], 64, generator=torch.Generator().manual_seed(0))
    best = torch.log_softmax(torch.linspace(1, 2, len(rows)) @ rows @ matrix / len(rows), 0).topk(20)
    order = [0, *range(20)]
    return 100 + best.indices[order], best.values[order]


class CoreClient:
    """What AsyncLLM asks of its engine's process."""

    engine_ranks_managed = (0,)

    def __init__(self, *, vllm_config: Any, **_: Any) -> None:
        self.engine = (WithVllmTower if os.environ.get("ENGINE_TOWER") == "vllm" else WithTower)(vllm_config)
        self.resources = SimpleNamespace(engine_dead=False)
        self._steps: asyncio.Task[None] | None = None

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        self.engine.queue(request)
        self._steps = self._steps or asyncio.create_task(self._run())

    async def abort_requests_async(self, names: list[str]) -> None:
        for name in names:
            self.engine.abort(name)

    async def reset_mm_cache_async(self) -> None:
        """There is none."""

    async def get_output_async(self) -> Any:
        if isinstance(outputs := await self.engine.outputs.get(), Exception):
            raise EngineDeadError from outputs
        return outputs

    def shutdown(self, timeout: float | None = None) -> None:
        """AsyncLLM calls it again when it is collected, at any time."""
        if self._steps:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._steps.cancel()
        self.engine.close()

    async def _run(self) -> None:
        try:
            while True:
                self.engine.step()
                await asyncio.sleep(0.001)
        except Exception as error:  # noqa: BLE001 - as vLLM, whose front end hears of any
            self.resources.engine_dead = True
            self.engine.outputs.put_nowait(error)
