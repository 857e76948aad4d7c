"""`vitwire sglang-encoder` driven by SGLang's own receiving code, over HTTP, with a real server behind it."""

import asyncio
import base64
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from sglang.srt.disaggregation.encoder import receiver as receiving
from sglang.srt.disaggregation.encoder.receiver import create_mm_receiver
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration
from sglang.srt.sampling.sampling_params import SamplingParams
from tests.engines.sglang.conftest import SGLang

from adapters import Adapter, adapting
from entered import entered
from vitwire import Embedding

_SECONDS = 60.0


second = entered(lambda vitwire: adapting(vitwire.target))


def uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def check(sglang: SGLang, inputs: Any, embeddings: list[Embedding]) -> None:
    """The inputs have the rows of each image at its place, and positions."""
    assert len(inputs.mm_items) == len(embeddings)
    for item, expected in zip(inputs.mm_items, embeddings, strict=True):
        ((start, end),) = item.offsets
        assert torch.equal(item.precomputed_embeddings, expected.torch())
        assert list(inputs.input_ids)[start : end + 1] == [sglang.config.image_token_id] * expected.shape[0]
    assert inputs.mrope_positions.shape == (3, len(inputs.input_ids))


def test_sglang_splits_deepstack_levels_as_vitwire_lays_them_out(sglang: SGLang, embeddings: list[Embedding]) -> None:
    levels = len(sglang.config.vision_config.deepstack_visual_indexes)
    model: Any = SimpleNamespace(config=sglang.config.text_config, num_deepstack_embeddings=levels)
    main, deepstack = Qwen3VLForConditionalGeneration.separate_deepstack_embeds(model, embeddings[0].torch())
    assert torch.equal(main.float(), torch.from_numpy(embeddings[0].main))
    expected = torch.cat([torch.from_numpy(each) for each in embeddings[0].deepstack], dim=-1)
    assert torch.equal(deepstack.float(), expected)


# -- zmq_to_tokenizer ------------------------------------------------------------------------------


async def received(sglang: SGLang, encoders: list[str], sources: list[str]) -> Any:
    """What SGLang's tokenizer manager gets for a request with these images; None if the encoder failed."""
    receiver = create_mm_receiver(sglang.server_args, transport_mode="http", encode_urls=encoders)
    request = GenerateReqInput(text=sglang.prompt(len(sources)), image_data=sources)
    return await receiver.recv_mm_data(request, sglang.processor, request.text)


@pytest.mark.parametrize("count", [1, 3])
async def test_the_tokenizer_gets_the_embeddings(
    sglang: SGLang, adapter: Adapter, images: list[Path], embeddings: list[Embedding], count: int
) -> None:
    inputs = await received(sglang, [adapter.http], [uri(each) for each in images[:count]])
    check(sglang, inputs, embeddings[:count])


async def test_several_encoders_each_encode_a_part(
    sglang: SGLang,
    adapter: Adapter,
    second: Adapter,
    images: list[Path],
    embeddings: list[Embedding],
) -> None:
    order = [0, 1, 2, 1, 0]
    inputs = await received(sglang, [adapter.http, second.http], [uri(images[each]) for each in order])
    check(sglang, inputs, [embeddings[each] for each in order])


async def test_base64_is_an_image_too(
    sglang: SGLang, adapter: Adapter, images: list[Path], embeddings: list[Embedding]
) -> None:
    sources = [base64.b64encode(images[0].read_bytes()).decode()]
    check(sglang, await received(sglang, [adapter.http], sources), embeddings[:1])


async def test_a_bad_image_fails_the_request_at_once(sglang: SGLang, adapter: Adapter, images: list[Path]) -> None:
    bad = "data:image/png;base64," + base64.b64encode(b"not an image").decode()
    started = time.monotonic()
    assert await received(sglang, [adapter.http], [uri(images[0]), bad]) is None
    assert time.monotonic() - started < _SECONDS  # SGLang gives up by itself after 180 s


async def test_without_a_server_the_request_fails_at_once(sglang: SGLang, images: list[Path]) -> None:
    started = time.monotonic()
    with adapting("127.0.0.1:1", "--timeout", "2") as alone:
        assert await received(sglang, [alone.http], [uri(images[0])]) is None
    assert time.monotonic() - started < _SECONDS


# -- zmq_to_scheduler ------------------------------------------------------------------------------


class Ranks(NamedTuple):
    """A tokenizer's receiver and those of tensor parallel schedulers."""

    tokenizer: Any
    schedulers: list[Any]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A process group of one, in which a scheduler agrees with itself."""
    file = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def ranks(sglang: SGLang, group: Any, encoders: list[str], size: int) -> Ranks:
    """Receivers of a server with the backend zmq_to_scheduler. Each scheduler polls for itself, in this process."""
    disagg = SimpleNamespace(encoder_transfer_backend="zmq_to_scheduler", encoder_urls=encoders)
    tp_group = SimpleNamespace(cpu_group=group, all_gather_object=lambda value: [value])
    scheduler = SimpleNamespace(
        model_config=SimpleNamespace(hf_eos_token_id={2}, vocab_size=512),
        disaggregation_mode=None,
        metrics_reporter=SimpleNamespace(enable_metrics=False),
        dllm_config=None,
        tokenizer=sglang.tokenizer,
    )
    schedulers = []
    with patch.object(receiving, "get_disagg", lambda: disagg):
        tokenizer = create_mm_receiver(sglang.server_args, transport_mode="http", encode_urls=encoders)
        for rank in range(size):
            parallel = SimpleNamespace(pp_rank=0, tp_rank=rank, tp_size=size, tp_group=tp_group, nnodes=1)
            with (
                patch.object(receiving, "get_parallel", lambda found=parallel: found),
                patch.object(receiving, "get_device", lambda: SimpleNamespace(gpu_id=0)),
            ):
                each = create_mm_receiver(
                    sglang.server_args, transport_mode="http", encode_urls=encoders, scheduler=scheduler
                )
            each.mm_processor = sglang.processor
            schedulers.append(each)
    return Ranks(tokenizer, schedulers)


async def scheduled(sglang: SGLang, found: Ranks, sources: list[str]) -> list[tuple[list[Any], list[Any]]]:
    """For each scheduler, the requests that are ready and those that it aborts."""
    text = sglang.prompt(len(sources))
    request = GenerateReqInput(text=text, image_data=sources)
    errors: list[Any] = []
    ready = found.tokenizer.send_encode_request(request, on_dispatch_error=errors.append)
    outcomes: list[tuple[list[Any], list[Any]]] = [([], []) for _ in found.schedulers]
    pending = [
        [
            TokenizedGenerateReqInput(
                rid=request.rid,
                input_text=text,
                input_ids=array("q", sglang.ids(len(sources))),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=SamplingParams(),
                return_logprob=False,
                logprob_start_len=0,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
                need_wait_for_mm_inputs=True,
                num_items_assigned=request.num_items_assigned,
                encoder_urls=request.encoder_urls,
            )
        ]
        for _ in found.schedulers
    ]
    ready.set()
    deadline = time.monotonic() + _SECONDS
    while not all(done or aborted for done, aborted in outcomes):
        assert time.monotonic() < deadline, "the request is stuck"
        for scheduler, new, (done, aborted) in zip(found.schedulers, pending, outcomes, strict=True):
            news, errors[:] = [*new, *errors], []
            new.clear()
            ready_now, aborted_now = scheduler.process_waiting_requests(news)
            done.extend(ready_now)
            aborted.extend(aborted_now)
        await asyncio.sleep(0.01)
    return outcomes


@pytest.mark.parametrize("size", [1, 2])
async def test_every_scheduler_gets_the_embeddings(
    sglang: SGLang,
    group: Any,
    adapter: Adapter,
    second: Adapter,
    images: list[Path],
    embeddings: list[Embedding],
    size: int,
) -> None:
    found = ranks(sglang, group, [adapter.http, second.http], size)
    for _ in range(2):  # the schedulers' sockets are used again
        for done, aborted in await scheduled(sglang, found, [uri(each) for each in images]):
            assert not aborted
            check(sglang, done[0].mm_inputs, embeddings)


async def test_a_bad_image_aborts_the_request_with_its_reason(
    sglang: SGLang, group: Any, adapter: Adapter, images: list[Path]
) -> None:
    bad = "data:image/png;base64," + base64.b64encode(b"not an image").decode()
    found = ranks(sglang, group, [adapter.http], 1)
    ((done, aborted),) = await scheduled(sglang, found, [uri(images[0]), bad])
    ((_, message, code),) = aborted
    assert not done
    assert "mm_items[1]" in message
    assert code == 400


async def test_without_a_server_the_request_is_aborted(sglang: SGLang, group: Any, images: list[Path]) -> None:
    with adapting("127.0.0.1:1", "--timeout", "2") as alone:
        found = ranks(sglang, group, [alone.http], 1)
        ((done, aborted),) = await scheduled(sglang, found, [uri(images[0])])
    assert not done
    assert aborted[0][2] in {502, 503, 504}
