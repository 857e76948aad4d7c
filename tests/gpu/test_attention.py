"""Every attention backend that is installed, against float32 attention, and in a graph whose boundaries change."""

from importlib import import_module
from types import ModuleType

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


@pytest.fixture
def hopper(device: torch.device) -> ModuleType:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("the kernel is for Hopper")
    pytest.importorskip("cutlass")
    return import_module("vitwire_server.runtime.kernels.hopper_attention")


ODD = [1, 17, 129, 64, 0, 300, 5, 112, 113, 192, 193, 2100]
"""With parts of blocks of keys and of tiles of queries, empty slots, and a segment that is not short."""


@torch.inference_mode()
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 88, 96, 128])
@pytest.mark.parametrize("longest", [1024, 4096])
def test_every_tile_of_the_kernel_for_hopper(
    head_dim: int, groups: int, longest: int, hopper: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`longest` decides whether programs take turns."""
    if groups == 3 and head_dim > 96:
        pytest.skip("registers do not hold it")
    monkeypatch.setattr(hopper, "hopper_groups", lambda *_: groups)
    boundaries = ends(ODD, device)
    qkv = torch.randn(sum(ODD) + 7, 3, HEADS, head_dim, dtype=torch.bfloat16, device=device)
    rows = hopper.hopper_attention(*qkv.unbind(1), Segments(boundaries, longest), 0.1)
    check(rows[: sum(ODD)], qkv[: sum(ODD)], boundaries)


@torch.inference_mode()
def test_scores_beyond_the_range_of_the_first_block(hopper: ModuleType, device: torch.device) -> None:
    """Its maximum stands in for the row's until a sum is out of range; then the tile is computed again.

    Keys of later blocks have scores that are larger by hundreds, in some rows of some heads of several tiles.
    """
    lengths = [900, 300, 2500]
    boundaries = ends(lengths, device)
    qkv = torch.randn(sum(lengths), 3, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    q, k, _ = qkv.unbind(1)
    for query, key, factor in ((50, 700, 9), (51, 890, 30), (1000, 1150, 100), (1300, 3600, 12), (3500, 2000, 100)):
        k[key, ::3] = q[query, ::3] * factor
    expected = segment_sdpa(*qkv.float().unbind(1), Segments(boundaries, len(qkv)), 0.1)
    scores = q[1000, 0].float() @ k[1150, 0].float() * 0.1
    assert scores > 400, "far beyond what the first block's maximum allows"
    for longest in (len(qkv), 1024):
        rows = hopper.hopper_attention(*qkv.unbind(1), Segments(boundaries, longest), 0.1).float()
        assert float((rows - expected).norm() / expected.norm()) <= torch.finfo(torch.bfloat16).eps
        worst = (rows - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(worst.max()) <= 4 * torch.finfo(torch.bfloat16).eps, "no row is lost among the others"
