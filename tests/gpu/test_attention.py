"""Every attention backend that is installed, against float32 attention, and in a graph whose boundaries change."""

from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor

from vitwire_server.runtime.attention.backends import BACKENDS, segment_sdpa
from vitwire_server.runtime.attention.selection import LoadedBackend, Selection
from vitwire_server.runtime.kernels.operands import Attend, Segments

HEADS, HEAD_DIM = 16, 72
LAYOUTS = ([100, 64, 0, 4, 300, 1, 33], [17, 129, 356, 0, 0, 0, 0], [502, 0, 0, 0, 0, 0, 0])


@pytest.fixture(params=list(BACKENDS))
def attend(request: pytest.FixtureRequest, device: torch.device) -> Attend:
    backend = BACKENDS[request.param]
    if device.type != "cuda" or backend.fault(device, torch.bfloat16, HEAD_DIM, captured=True):
        pytest.skip(f"{backend.name} does not serve graphs on {device}")
    try:
        return backend.load()
    except (ImportError, ValueError, RuntimeError) as error:
        pytest.skip(f"{backend.name} is not installed: {error}")


def ends(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


def check(rows: Tensor, qkv: Tensor, boundaries: Tensor) -> None:
    expected = segment_sdpa(*qkv.float().unbind(1), Segments(boundaries, len(qkv)), 0.1)
    error = float((rows.float() - expected).norm() / expected.norm())
    assert error <= torch.finfo(torch.bfloat16).eps, "shares are rounded, then the rows"


@torch.inference_mode()
def test_eager_and_captured(attend: Attend, device: torch.device) -> None:
    qkv = torch.randn(sum(LAYOUTS[0]), 3, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    boundaries = ends(LAYOUTS[0], device)
    for layout in LAYOUTS:
        check(attend(*qkv.unbind(1), Segments(ends(layout, device), len(qkv)), 0.1), qkv, ends(layout, device))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        attend(*qkv.unbind(1), Segments(boundaries, len(qkv)), 0.1)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        rows = attend(*qkv.unbind(1), Segments(boundaries, len(qkv)), 0.1)
    for layout in LAYOUTS:
        qkv.copy_(torch.randn_like(qkv))
        boundaries.copy_(ends(layout, device))
        graph.replay()
        check(rows, qkv, boundaries)


@torch.inference_mode()
def test_queries_of_other_numbers_than_keys(attend: Attend, device: torch.device) -> None:
    """As a resampler has them: so many for each segment, none for empty slots, and rows behind the last one."""
    queries, keys = [64, 64, 64, 0, 0], [300, 1, 101, 0, 0]
    q = torch.randn(320, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(402, 2, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device).unbind(1)
    segments = Segments(ends(queries, device), 64, ends(keys, device), 402)
    expected = segment_sdpa(q.float(), k.float(), v.float(), segments, 0.1)[:192]
    rows = attend(q, k, v, segments, 0.1)[:192]
    assert float((rows.float() - expected).norm() / expected.norm()) <= torch.finfo(torch.bfloat16).eps


@torch.inference_mode()
def test_no_segment_sees_another(attend: Attend, request: pytest.FixtureRequest, device: torch.device) -> None:
    """Flash attention reads blocks of keys that reach into the next segment, and 0 * NaN is NaN."""
    name = request.node.callspec.params["attend"]
    choice = Selection.only(LoadedBackend(name, attend), "to be tested")
    layout = [100, 64, 0, 40, 300, 1, 33]
    qkv = torch.randn(sum(layout), 3, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    bad, good = slice(164, 204), torch.ones(len(qkv), dtype=torch.bool, device=device)
    good[bad] = False
    for lost in (torch.nan, torch.inf):
        qkv[bad] = lost
        rows = choice.attend(*qkv.unbind(1), Segments(ends(layout, device), 300), 0.1)
        assert rows[good].isfinite().all()
        assert rows[bad].isnan().all()


@torch.inference_mode()
@pytest.mark.parametrize(
    ("lengths", "tile"),
    [([784], (128, 112)), ([1, 0, 1023], (128, 128)), ([1025], None), ([800, 800], (128, 128)), ([2049], None)],
)
def test_few_rows_take_small_tiles_of_flash_attention_4(
    lengths: list[int], tile: tuple[int, int] | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its function that takes tiles is private: a release may rename it, and all rows would take the usual ones."""
    interface = pytest.importorskip("flash_attn.cute.interface")
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("small tiles are for Hopper")
    forward, taken = interface._flash_attn_fwd, []

    @wraps(forward)
    def watched(*arguments: Tensor, **named: Any) -> Any:
        taken.append(named.get("tile_mn"))
        return forward(*arguments, **named)

    monkeypatch.setattr(interface, "_flash_attn_fwd", watched)
    boundaries = ends(lengths, device)
    qkv = torch.randn(sum(lengths), 3, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    check(BACKENDS["fa4"].load()(*qkv.unbind(1), Segments(boundaries, max(lengths)), 0.1), qkv, boundaries)
    assert taken == [tile]
