"""vLLM: its settings, and one request through it. Nothing of vLLM is imported before it is needed."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.engine.answers import Answer
from bench.engine.requests import Asked

from vitwire import VitwireError

if TYPE_CHECKING:
    from bench.engine.routes import Route

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}
"""Defaults before vLLM is imported; stdout is the benchmark's.

OMP_NUM_THREADS is for the front end: with a thread for each core, each copy of pixels into memory that is shared with
the engine leaves threads that wait busily. vLLM limits them in the engine only.
"""
_CAPTURE_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 288, 320, 384, 512, 768, 1024, 1152, 1536, 2048, 2304, 3072, 4096]
"""Prompts with images too: vLLM's default ends at 512 tokens, and it launches a longer prefill kernel by kernel, which
takes longer than the device needs for it."""


def arguments(
    model: Path, target: str, *, images: int, graphs: bool = True, delivery: str = "auto", wait: float = 10
) -> dict[str, Any]:
    """An engine with its own tower that takes embeddings too, and references to `target` unless empty.

    Nothing is reused between requests. images: the most of one request. graphs: of its tower; with them, vLLM 0.33
    ends at the first request with embeddings inline.
    """
    chosen: dict[str, Any] = {
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 24 << 30,
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,
        "skip_mm_profiling": True,
        "limit_mm_per_prompt": {"image": images, "video": 0},
        "enable_mm_embeds": True,
        "mm_tensor_ipc": "torch_shm",
        "compilation_config": {"cudagraph_capture_sizes": _CAPTURE_SIZES, "cudagraph_mm_encoder": graphs},
        "renderer_num_workers": 4,
        "seed": 0,
    }
    if target:
        chosen["ec_transfer_config"] = {
            "ec_connector": "VitwireECConnector",
            "ec_connector_module_path": "vitwire.integrations.vllm",
            "ec_role": "ec_consumer",
            "ec_connector_extra_config": {
                "target": target,
                "wait": wait,
                "delivery": delivery,
                "delivery_bytes": 1 << 30,  # 32 embeddings of 1024² for the 8B
            },
        }
    return chosen


def start(chosen: Mapping[str, Any]) -> Any:
    """An `AsyncLLM`, whose engine is a process. Needs a running loop, and blocks it for minutes."""
    import torch  # noqa: PLC0415 - seconds
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - as above
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415 - as above

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # imported before the variable was set
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**chosen, disable_log_stats=False))


def described() -> dict[str, str]:
    """The engine and its device, without a CUDA context in this process."""
    import vllm  # noqa: PLC0415 - as above
    from vllm.platforms import current_platform  # noqa: PLC0415 - as above

    return {"engine": f"vLLM {vllm.__version__}", "device": current_platform.get_device_name()}


def connector_counts() -> dict[str, float]:
    """Counters of the EC connector since the engines' start, as on vLLM's metrics page."""
    from prometheus_client import REGISTRY  # noqa: PLC0415 - as above

    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    counts: dict[str, float] = {}
    for sample in samples:
        if sample.name.startswith("vllm:vitwire_ec_") and sample.name.endswith("_total"):
            name = sample.name.removeprefix("vllm:vitwire_ec_").removesuffix("_total")
            counts[name] = counts.get(name, 0) + sample.value
    return counts


async def answered(route: "Route", asked: Asked, ready: Any, name: str, tokens: int) -> Answer:
    """One request through the route's engine, `tokens` long; an error of the server or of this request is noted."""
    from vllm.exceptions import GenerationError, VLLMClientError  # noqa: PLC0415 - seconds

    answer = Answer(start=time.monotonic())
    try:
        inputs = await route.inputs(asked, ready, answer)
        answer.moments["submitted"] = time.monotonic()
        await _generated(route.front, inputs, name, tokens, answer)
    except (VitwireError, GenerationError, VLLMClientError) as error:
        answer.error = repr(error)
    answer.end = time.monotonic()
    return answer


async def _generated(engine: Any, inputs: Any, name: str, tokens: int, answer: Answer) -> None:
    """Greedy tokens. The stages within the engine come from its statistics, by the same clock."""
    from vllm import SamplingParams  # noqa: PLC0415 - as above
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415 - as above

    parameters = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    output = None
    async for output in engine.generate(inputs, parameters, name):
        if output.outputs and output.outputs[0].token_ids:
            answer.arrivals.append(time.monotonic())
            answer.tokens.extend(output.outputs[0].token_ids)
    if len(answer.tokens) < tokens:
        answer.error = f"{len(answer.tokens)} of {tokens} tokens: {output and output.outputs[0].finish_reason}"
        return
    answer.moments["first_token"] = answer.arrivals[0]
    metrics = output.metrics if output else None
    if metrics and metrics.scheduled_ts:
        answer.moments["queued"] = metrics.queued_ts
        answer.moments["scheduled"] = metrics.scheduled_ts
        answer.moments["prefilled"] = metrics.first_token_ts
