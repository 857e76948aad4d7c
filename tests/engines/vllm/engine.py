"""vLLM's own front end, scheduler and worker-side connector calls, around a model that samples a fixed token."""

import time
from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.ec_transfer import ec_transfer_state
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.cache import engine_receiver_cache_from_config
from vllm.renderers import ChatParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.ec_connector import get_ec_connector
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

BLOCK = 16
TOKEN = 65
SECONDS = 60
"""For what has to happen at last, on a busy machine."""


def vllm_config(model: Path, target: str, extra: dict[str, Any] | None = None, **arguments: Any) -> VllmConfig:
    """The configuration of a language model without its tower, behind a Vitwire server."""
    transfer = {
        "ec_connector": "VitwireECConnector",
        "ec_connector_module_path": "vitwire.integrations.vllm",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": {"target": target, "allow_caller_embeds": True} | (extra or {}),
    }
    defaults: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "async_scheduling": False,
        "limit_mm_per_prompt": {"image": 8, "video": 8},
        "ec_transfer_config": transfer,
    }
    config = EngineArgs(model=str(model), **defaults | arguments).create_engine_config()
    config.cache_config.num_gpu_blocks = 256
    return config


class Engine:
    """One engine with one worker. `step` is EngineCore's, without the forward."""

    def __init__(self, config: VllmConfig, frontend: InputProcessor, blocks: int = 256) -> None:
        self.config = config
        self.frontend = frontend
        self._numbers = count()
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
        caches = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        kind = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
        config.cache_config.num_gpu_blocks = blocks
        assert not ec_transfer_state.has_ec_transfer(), "another engine of this process is open"
        with set_current_vllm_config(config):
            ec_transfer_state.ensure_ec_transfer_initialized(config)
            self.scheduler = kind(config, caches, StructuredOutputManager(config), BLOCK, log_stats=True)
        self.cache = EncoderCache()
        self.worker = get_ec_connector(config, self.cache)
        hidden = config.model_config.get_inputs_embeds_size()
        self.runner = EncoderRunner(None, 4096, hidden, self.cache, torch.bfloat16, torch.device("cpu"))
        self.tokens: dict[str, list[int]] = {}
        self.errors: set[str] = set()
        self.gathered: dict[str, list[torch.Tensor]] = {}
        self.stats: dict[str, float] = {}
        self.longest_schedule = 0.0
        self.preemptions = 0
        self._received = engine_receiver_cache_from_config(config)
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._open = True

    @property
    def connector(self) -> Any:
        """The scheduler's."""
        return self.scheduler.ec_connector

    def close(self) -> None:
        """Once: later, the process's connector is another engine's."""
        if not self._open:
            return
        self._open = False
        ec_transfer_state.ensure_ec_transfer_shutdown()
        if self.scheduler.ec_connector:
            self.scheduler.ec_connector.shutdown()

    def request(self, name: str) -> Request:
        return self._requests[name]

    def add(
        self, parts: list[dict[str, Any]], tokens: int = 2, chat: dict[str, Any] | None = None, **extra_args: Any
    ) -> str:
        """Queue a chat completion with these content parts; returns its id."""
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
        (_,), (prompt,) = self.frontend.renderer.render_chat([messages], ChatParams(**chat or {}))
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args=extra_args or None)
        return self.queue(self.frontend.process_inputs(f"request-{next(self._numbers)}", prompt, params, ("generate",)))

    def queue(self, core: Any) -> str:
        """Queue what the front end made of a request; returns its id."""
        if self._received is not None and core.mm_features:
            core.mm_features = self._received.get_and_update_features(core.mm_features)
        request = self._requests[core.request_id] = Request.from_engine_core_request(core, None)
        self.scheduler.add_request(request)
        return str(core.request_id)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self, in_flight: int = 1) -> int:
        """Schedule and execute, and use the output once so many steps are in flight; returns the scheduled tokens."""
        start = time.monotonic()
        scheduled = self.scheduler.schedule()
        self.longest_schedule = max(self.longest_schedule, time.monotonic() - start)
        self.preemptions += len(scheduled.preempted_req_ids or ())
        self._in_flight.append((scheduled, self._execute(scheduled)))
        while len(self._in_flight) >= in_flight:
            self._update(self.scheduler.update_from_output(*self._in_flight.popleft()))
        return int(scheduled.total_num_scheduled_tokens)

    def run_until(self, condition: Callable[[], bool], in_flight: int = 1) -> None:
        """Step until it holds. Raises AssertionError if it takes too long."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"errors {self.errors}, tokens {self.tokens}"
            if not self.step(in_flight):
                time.sleep(0.001)  # as EngineCore does

    def run(self, *names: str, in_flight: int = 1) -> None:
        """Step until these requests have ended, and once more, for their last outputs."""
        self.run_until(lambda: not any(name in self.scheduler.requests for name in names), in_flight)
        self.step()

    def _execute(self, scheduled: Any) -> ModelRunnerOutput:
        """The parts of the model runner V2 that concern the encoder cache, in its order."""
        for name in scheduled.finished_req_ids:
            self.cache.remove_request(name)
        for mm_hash in scheduled.free_encoder_mm_hashes:
            self.cache.free_encoder_cache(mm_hash)
        for new in scheduled.scheduled_new_reqs:
            self.cache.add_request(new.req_id, new.mm_features)
        if not scheduled.total_num_scheduled_tokens:
            return self.worker.no_forward(scheduled)
        names = list(scheduled.num_scheduled_tokens)
        with self.worker.maybe_get_output(scheduled) as ec_output:
            assert not scheduled.scheduled_encoder_inputs, "the engine has no tower"
            self._gather(scheduled, names)
        sampled = [[TOKEN] if self._samples(scheduled, name) else [] for name in names]
        output = ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)
        return ModelRunnerOutput.with_ec_conn_output(output, ec_output)

    def _gather(self, scheduled: Any, names: list[str]) -> None:
        """vLLM's own code picks the rows of this step; it raises for those that are missing."""
        for name in names:
            request, number = self._requests[name], scheduled.num_scheduled_tokens[name]
            computed = self._computed(scheduled, name)
            rows, is_embedding = self.runner.gather_mm_embeddings(
                [name],
                number,
                np.array([number]),
                np.array([0, number]),
                np.array([request.num_prompt_tokens]),
                np.array([computed]),
            )
            assert int(is_embedding.sum()) == sum(len(each) for each in rows)
            self.gathered.setdefault(name, []).extend(rows)

    def _computed(self, scheduled: Any, name: str) -> int:
        for new in scheduled.scheduled_new_reqs:
            if new.req_id == name:
                return int(new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        return int(cached.num_computed_tokens[cached.req_ids.index(name)])

    def _samples(self, scheduled: Any, name: str) -> bool:
        end = self._computed(scheduled, name) + scheduled.num_scheduled_tokens[name]
        return end >= self._requests[name].num_prompt_tokens

    def _update(self, outputs: Any) -> None:
        for each in outputs.values():
            for output in each.outputs:
                self._note(output)
            if each.scheduler_stats and each.scheduler_stats.ec_connector_stats:
                for key, value in each.scheduler_stats.ec_connector_stats.items():
                    self.stats[key] = self.stats.get(key, 0) + value

    def _note(self, output: EngineCoreOutput) -> None:
        self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        if output.finish_reason is not None and str(output.finish_reason) == "error":
            self.errors.add(output.request_id)
