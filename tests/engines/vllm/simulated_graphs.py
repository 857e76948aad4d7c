"""Runs vLLM's tower of `make gpu-bench FLAGS=--vllm` on the CPU: a graph replays the forward that it recorded.

vLLM's budgets, padding and metadata of its encoder graphs are then the real ones.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import tests.engines.vllm.cpu_platform  # noqa: F401  # before the rest of vLLM
import torch
from vllm.distributed import parallel_state
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker import encoder_cudagraph


@dataclass
class Metadata(encoder_cudagraph.BudgetGraphMetadata):
    """Of a graph that has no other use than its own metadata."""

    def __post_init__(self) -> None:
        self.graph.metadata = self


class Graph:
    """A replay calls the forward again, on the buffers that were recorded."""

    metadata: Metadata
    model: Any

    def replay(self) -> None:
        output = self.metadata.output_buffer
        output.copy_(self.model.encoder_cudagraph_forward({**self.metadata.input_buffers}))


@contextlib.contextmanager
def nothing(*_: Any, **__: Any) -> Any:
    yield


def simulate() -> None:
    """Replace everything that needs CUDA."""
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.synchronize = lambda *_: None
    torch.cuda.CUDAGraph = Graph  # type: ignore[assignment]
    torch.cuda.graph = nothing  # type: ignore[assignment]
    parallel_state.graph_capture = nothing
    encoder_cudagraph.current_stream = lambda: None
    encoder_cudagraph.BudgetGraphMetadata = Metadata
    CpuPlatform.graph_pool_handle = lambda _: (0, 0)


if __name__ == "__main__":
    simulate()
    from bench.engine.towers.answering import answering  # once all of the above holds
    from bench.engine.towers.vllm_tower import VllmTower

    def load(job: dict[str, Any]) -> VllmTower:
        tower = VllmTower(job)
        Graph.model = tower._model
        return tower

    answering(load)
