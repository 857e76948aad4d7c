"""What vLLM's factory, base class, loggers and output aggregator need of the connector."""

import pickle
import time
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, generate_latest
from tests.engines.vllm.conftest import Cached
from tests.engines.vllm.engine import SECONDS, Engine, vllm_config
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorLogging, ECConnectorProm
from vllm.distributed.ec_transfer.ec_connector.utils import ECOutputAggregator
from vllm.v1.outputs import ECConnectorOutput, ModelRunnerOutput

from vitwire import Model
from vitwire.integrations.vllm import VitwireECConnector, reference_part

GRID = (1, 4, 4)


@pytest.fixture
def config(checkpoint: Any, server: Any) -> Any:
    return vllm_config(checkpoint, server.target)


def make(config: Any, role: ECConnectorRole = ECConnectorRole.SCHEDULER) -> ECConnectorBase:
    return ECConnectorFactory.create_connector(config, role)


@pytest.mark.parametrize("role", ECConnectorRole)
def test_the_factory_loads_it_by_its_module(config: Any, role: ECConnectorRole) -> None:
    connector = make(config, role)
    assert type(connector) is VitwireECConnector
    assert connector.is_consumer
    assert not connector.is_producer
    assert not connector.has_pending_push_work()
    connector.shutdown()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"target": ""}, "ec_connector_extra_config.target: set the address"),
        ({"target": "http://host"}, "http"),
        ({"adress": 1}, "unknown key 'adress'; the keys are target, tls"),
        ({"timeout": "5"}, "timeout: expected int or float, got '5'"),
        ({"delivery": "rdma"}, "delivery: expected one of auto, stream, nixl"),
    ],
)
def test_wrong_settings(checkpoint: Any, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(vllm_config(checkpoint, "localhost:1", extra))


def test_configurations_that_it_refuses(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config.ec_transfer_config.ec_role = "ec_both"
    with pytest.raises(ValueError, match="must be ec_consumer, not ec_both"):
        make(config)
    config.ec_transfer_config.ec_role = "ec_consumer"
    config.model_config.multimodal_config.video_pruning_rate = 0.5
    with pytest.raises(ValueError, match="--video-pruning-rate"):
        make(config)
    config.model_config.multimodal_config.video_pruning_rate = None
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="set VLLM_USE_V2_MODEL_RUNNER=1"):
        make(config)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config.model_config.runner_type = "pooling"
    with pytest.raises(ValueError, match=r"would end vLLM 0\.33's API server"):
        make(config)
    config.model_config.runner_type = "generate"
    config.parallel_config.distributed_executor_backend = "external_launcher"
    with pytest.raises(ValueError, match="ranks of external_launcher"):
        make(config)
    monkeypatch.delattr(ECConnectorBase, "take_unavailable_requests")
    with pytest.raises(ValueError, match=r"needs vLLM 0\.33 or newer: this one has no take_unavailable_requests"):
        make(config)


def test_a_deepstack_model_needs_its_tower(checkpoint: Any) -> None:
    limits = {"image": 0, "video": 0}
    with pytest.raises(ValueError, match="deepstack levels, which vLLM drops with the tower"):
        make(vllm_config(checkpoint, "localhost:1", limit_mm_per_prompt=limits))
    make(vllm_config(checkpoint, "localhost:1", limit_mm_per_prompt=limits | {"image": 1})).shutdown()


def test_tensor_parallel_workers_fetch_for_themselves(engine: Engine, cached: Cached, model: Model) -> None:
    """Two workers, whose outputs vLLM's aggregator merges: loaded once both have it, failed once one has not."""
    embedding = cached("parallel")
    config = engine.config
    config.parallel_config.tensor_parallel_size = 2
    config.parallel_config.distributed_executor_backend = "mp"
    scheduler = make(config)
    workers = [make(config, ECConnectorRole.WORKER) for _ in range(2)]
    caches: list[dict[str, torch.Tensor]] = [{}, {}]
    aggregator = ECOutputAggregator()
    hit = engine.request(engine.add([reference_part(GRID, model, "parallel")]))
    miss = engine.request(engine.add([reference_part(GRID, model, "nowhere")]))
    free = type("Output", (), {"free_encoder_mm_hashes": []})()

    def step(only: int | None = None) -> None:
        metadata = pickle.dumps(scheduler.build_connector_meta(free))
        outputs: list[ModelRunnerOutput | None] = []
        for number, worker in enumerate(workers):
            worker.bind_connector_metadata(pickle.loads(metadata))
            worker.start_load_caches(caches[number])
            reported = None if only not in (None, number) else worker.build_connector_worker_meta()
            worker.clear_connector_metadata()
            output = ECConnectorOutput(ec_connector_worker_meta=pickle.loads(pickle.dumps(reported)))
            outputs.append(ModelRunnerOutput([], {}, ec_connector_output=output))
        merged = aggregator.aggregate(outputs)
        if merged and merged.ec_connector_output:
            scheduler.update_connector_output(merged.ec_connector_output)

    assert not scheduler.ensure_cache_available(hit, 0)
    deadline = time.monotonic() + SECONDS
    step()
    while workers[0]._fetcher._ended.empty():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    step(only=0)
    assert not scheduler.ensure_cache_available(hit, 0)  # the second worker has not reported it
    while not scheduler.ensure_cache_available(hit, 0):
        assert time.monotonic() < deadline
        step()
    scheduler.update_state_after_alloc(hit, 0)
    step()
    assert all(torch.equal(cache["parallel"], embedding.torch()) for cache in caches)
    assert not scheduler.ensure_cache_available(miss, 0)
    failed: set[str] = set()
    while not failed:
        assert time.monotonic() < deadline
        step()
        failed = scheduler.take_unavailable_requests()
    assert failed == {miss.request_id}
    for each in (scheduler, *workers):
        each.shutdown()


def test_statistics_are_logged_and_exported(config: Any) -> None:
    seen = {"fetched": 2, "missing": 1, "failed": 0, "seconds": 0.3, "streamed_bytes": 4096, "nixl_bytes": 0}
    logging, lines = ECConnectorLogging(config.ec_transfer_config), []
    for _ in range(2):
        logging.observe(seen)
    logging.log(lambda text, *values: lines.append(text % values))
    sums = "fetched=4, missing=2, failed=0, resent=0, streamed_bytes=8192, nixl_bytes=0, mean_milliseconds=100.0"
    assert lines == [f"EC Transfer metrics: {sums}"]
    registry = CollectorRegistry()
    prom = type("Prom", (ECConnectorProm,), {"_counter_cls": lambda *_, **named: Counter(**named, registry=registry)})
    metrics = prom(config, ["engine"], {0: ["0"]})
    metrics.observe(seen)
    text = generate_latest(registry).decode()
    assert 'vllm:vitwire_ec_fetched_items_total{engine="0"} 2.0' in text
    assert 'vllm:vitwire_ec_streamed_bytes_total{engine="0"} 4096.0' in text
