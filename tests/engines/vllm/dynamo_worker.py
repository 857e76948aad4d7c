"""Dynamo's worker as far as it encodes images; as a program, one that Dynamo's frontend finds and sends requests to."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import tests.engines.vllm.cpu_platform  # noqa: F401  # before the rest of vLLM
import torch
from dynamo.common.utils.runtime import create_runtime
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.vllm.args import parse_args
from dynamo.vllm.handlers import DecodeWorkerHandler
from transformers import AutoTokenizer

CLASS = "vitwire.integrations.dynamo.VitwireEncoder"
IMAGE_TOKEN = 500
Workers = Callable[..., DecodeWorkerHandler]


def worker_config(model: Path) -> Any:
    """The configuration of `python -m dynamo.vllm` with Vitwire as its custom encoder."""
    arguments = ["--model", str(model), "--enable-multimodal", "--enable-mm-embeds", "--custom-encoder-class", CLASS]
    return parse_args([*arguments, "--max-model-len", "1024", "--enforce-eager"])


def loaded_worker(config: Any, engine_config: Any) -> DecodeWorkerHandler:
    """A worker that has loaded its encoder, without its constructor, which needs an engine."""
    worker = object.__new__(DecodeWorkerHandler)
    worker.model_config = engine_config.model_config
    worker._load_custom_encoder(config)
    return worker


async def prompt(worker: DecodeWorkerHandler, *urls: str) -> Any:
    """The prompt that Dynamo gives vLLM for a request with these images."""
    request = {
        "token_ids": [65, *[502, IMAGE_TOKEN, 503] * len(urls), 66],
        "multi_modal_data": {"image_url": [{"Url": url} for url in urls]},
    }
    return await worker._assemble_custom_encoder_prompt(request, "request")


def images_of(found: Any) -> tuple[torch.Tensor, list[list[int]]]:
    """The rows and the grids in a prompt."""
    images = found["multi_modal_data"]["image"]
    return images["image_embeds"], images["image_grid_thw"].tolist()


async def serve(model: str) -> None:
    """Answer requests with the number of vectors of their images, in place of an engine."""
    config = worker_config(Path(model))
    worker = loaded_worker(config, config.engine_args.create_engine_config())
    tokenizer = AutoTokenizer.from_pretrained(model)

    async def generate(request: dict[str, Any], context: object = None) -> AsyncIterator[dict[str, Any]]:
        prompt = await worker._assemble_custom_encoder_prompt(request, "request")
        count = len(prompt["multi_modal_data"]["image"]["image_embeds"]) if prompt else 0
        yield {"token_ids": tokenizer.encode(str(count)), "finish_reason": "stop", "index": 0}

    runtime, _ = create_runtime("file", "tcp")
    endpoint = runtime.endpoint("dynamo.backend.generate")
    await register_model(ModelInput.Tokens, ModelType.Chat, endpoint, model, "tiny", worker_type=WorkerType.Aggregated)
    await endpoint.serve_endpoint(generate)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
