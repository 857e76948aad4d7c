"""Launches that look up compiled kernels against Triton's; `make kernel-test` has a driver without a device."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

import triton
from tests.gpu.test_kernels import interpreted
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from vitwire_server.runtime.kernels.attention import segment_attention
from vitwire_server.runtime.kernels.launching import Kernel
from vitwire_server.runtime.kernels.norms import Norm, add_norm
from vitwire_server.runtime.kernels.operands import Segments
from vitwire_server.runtime.kernels.rotary import rotate
from vitwire_server.runtime.kernels.rowwise import activate, contain, copy_checked, interpolated

BF16 = torch.bfloat16


def _of_triton(in_ptr, more_ptr, out_ptr, count, stride, factor, BLOCK: tl.constexpr, MORE: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(in_ptr + at * stride, mask=at < count)
    if MORE:
        values += tl.load(more_ptr + at, mask=at < count)
    tl.store(out_ptr + at, values * factor, mask=at < count)


_scaled = Kernel(triton.jit(_of_triton, do_not_specialize=["count"]))


class OnDevice(Tensor):
    """A tensor whose address is never read."""

    is_cuda = True


class Recording:
    """A driver without a device, which records what it is given to launch."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.utils = self
        self._loaded = count(1)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, *_: object) -> tuple[int, int, int, int, int]:
        return 0, next(self._loaded), 0, 0, 1024

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            placed, values = arguments[:6], arguments[9:]  # between them are hooks and what they get
            self.launched.append((*placed, *(each.data_ptr() if isinstance(each, Tensor) else each for each in values)))

        return launch


@pytest.fixture
def recording() -> Iterator[Recording]:
    if interpreted():
        pytest.skip("Triton's interpreter compiles nothing to look up")
    before = driver._active
    driver.set_active(recorded := Recording())
    yield recorded
    driver.set_active(before)


def test_launches_are_those_of_triton(recording: Recording) -> None:
    """With all that may change what Triton compiles, in turns: kinds that are alike must not be confused."""
    rows = torch.zeros(64, dtype=BF16).as_subclass(OnDevice)
    arguments = [rows, rows, rows, 5, 32, 0.5]
    constants: dict[str, Any] = {"BLOCK": 32, "MORE": True, "num_warps": 4}
    launches: list[tuple[list[Any], dict[str, Any]]] = [(arguments, constants)]
    for place, values in (
        (0, (rows.float(), rows.half(), rows[1:], rows[8:])),
        (3, (1, 16, 1 << 31, 1 << 40)),
        (4, (1, 17, 33, 48, (1 << 31) - 1, 1 << 31, 1 << 33)),
        (5, (1.0, 16.0)),
    ):
        launches += [([*arguments[:place], value, *arguments[place + 1 :]], constants) for value in values]
    launches += [
        (arguments, constants | changed)
        for changed in ({"BLOCK": 16}, {"num_warps": 8}, {"launch_pdl": True}, {"num_stages": 2}, {"BLOCK": 4})
    ]
    launches.append(([rows, None, *arguments[2:]], constants | {"MORE": False}))
    expected = []
    for given, named in launches:
        _scaled._function[3, 2](*given, **named)
        expected.append(recording.launched.pop())
    assert len({launch[4] for launch in expected}) > len(launches) / 2, "most are separate kernels"
    for _ in range(3):
        for given, named in launches:
            _scaled[3, 2](*given, **named)
    assert recording.launched == 3 * expected


def test_arguments_on_the_host_are_left_to_triton(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that a device cannot read them."""
    seen = refusing(monkeypatch)
    rows = torch.zeros(64)
    with pytest.raises(AssertionError, match="Triton launches"):
        _scaled[1,](rows, None, rows, 5, 1, 0.5, BLOCK=32, MORE=False)
    assert seen == ["_of_triton"]


def refusing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Triton's launches fail from now on; returns the names of their kernels."""
    names: list[str] = []

    def run(self: Any, *_: Any, **__: Any) -> None:
        names.append(self.fn.__name__)
        raise AssertionError("Triton launches")

    monkeypatch.setattr(jit.JITFunction, "run", run)
    return names


def norms(device: torch.device) -> list[Tensor]:
    rows, added = torch.randn(2, 65, 1152, dtype=BF16, device=device)
    norm, rms = nn.LayerNorm(1152, dtype=BF16, device=device), nn.RMSNorm(1152, 1e-6, dtype=BF16, device=device)
    bias, own = norm.bias + 1, Norm.of(norm)
    return [
        *add_norm(rows, None, own),
        *add_norm(rows, added, Norm.of(rms), overlapping=True),
        *add_norm(rows, added, own, bias, factor=bias, overlapping=True),
    ]


def activations(device: torch.device) -> list[Tensor]:
    rows = torch.randn(65, 4304, dtype=BF16, device=device)
    return [activate(rows.clone(), "gelu"), activate(rows, "silu", gated=True)]


def attention(device: torch.device) -> list[Tensor]:
    qkv = torch.randn(100, 3, 4, 64, dtype=BF16, device=device)
    ends = torch.tensor([0, 36, 100], dtype=torch.int32, device=device)
    rotate(qkv, *torch.randn(2, 100, 64, device=device))
    return [qkv, segment_attention(*qkv.unbind(1), Segments(ends, 64), 0.1), *contain(qkv[:, 1], qkv[:, 2])]


def copies(device: torch.device) -> list[Tensor]:
    rows = torch.randn(9, 1152, dtype=BF16, device=device)
    out, finite = torch.empty_like(rows, dtype=torch.float32), torch.empty(9, dtype=torch.bool, device=device)
    copy_checked(rows, out, finite)
    indices, weights = torch.randint(0, 9, (9, 4), device=device), torch.rand(9, 4, device=device)
    return [out, finite, interpolated(rows, indices, weights)]


@pytest.mark.parametrize("launch", [norms, activations, attention, copies])
@torch.inference_mode()
def test_kernels_are_looked_up(
    launch: Callable[[torch.device], list[Tensor]], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second launch on, eagerly and in a graph, with the same results."""
    if device.type != "cuda":
        pytest.skip("runs kernels")
    torch.manual_seed(0)
    expected = launch(device)
    seen = refusing(monkeypatch)
    torch.manual_seed(0)
    for got, wanted in zip(launch(device), expected, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    assert not seen
