"""Products of recorded forwards: by a chosen algorithm, beside blocks."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytest.importorskip("triton")

from tests.gpu.test_kernels import distance

from vitwire_server.runtime.fused.surroundings import hasten_mergers
from vitwire_server.runtime.graph_recording import recording
from vitwire_server.runtime.graphs import CudaRecorder
from vitwire_server.runtime.products import quack_tiles
from vitwire_server.runtime.products.choices import Choices
from vitwire_server.runtime.products.cublaslt import CublasLt, Epilogue
from vitwire_server.runtime.products.quack_tiles import quack_on
from vitwire_server.runtime.products.tuned import Products

HOPPER = (9, 0)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("cuBLASLt")
    return device


@torch.inference_mode()
@pytest.mark.parametrize("count", [49, 196, 1568])
def test_recorded_products_are_those_of_torch(
    count: int, cuda: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton  # noqa: PLC0415 - there only where the tests run

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    layers = [nn.Linear(1152, 1152, device=cuda, dtype=torch.bfloat16) for _ in range(3)]
    rows, hidden = torch.randn(2, count, 1152, device=cuda, dtype=torch.bfloat16)
    linear = layers[1]

    def results(products: Products) -> list[Tensor]:
        return [
            products.linear(rows, linear.weight, linear.bias),
            products.linear(rows, linear.weight, None),
            products.linear(rows, linear.weight, linear.bias, gelu=True),
            products.add(hidden.clone(), rows, linear.weight),
        ]

    expected = [each.clone() for each in results(Products())]
    for _ in range(2):  # measured, then read from the file
        products, recorded = Products(), [torch.empty_like(each) for each in expected]
        products.register(*(layer.weight for layer in layers))

        def forward(products: Products = products, into: list[Tensor] = recorded) -> None:
            for target, each in zip(into, results(products), strict=True):
                target.copy_(each)

        replay = CudaRecorder(torch.cuda.Stream(cuda)).record(forward)
        for target in recorded:
            target.fill_(torch.nan)
        torch.cuda.synchronize()
        replay()
        torch.cuda.synchronize()
        for got, want in zip(recorded, expected, strict=True):
            assert distance(got, want) <= 2 * torch.finfo(torch.bfloat16).eps
        assert len(list(tmp_path.glob("vitwire-products-*.json"))) == 1


@torch.inference_mode()
@pytest.mark.parametrize(("count", "fewer"), [(64, 56), (384, 196), (1568, 1500), (4096, 3136)])
@pytest.mark.parametrize("epilogue", [*Epilogue, "add"])
def test_algorithms_are_taken_over_for_fewer_rows(
    epilogue: Epilogue | str, count: int, fewer: int, cuda: torch.device
) -> None:
    adds = epilogue == "add"
    kind = Epilogue.NONE if isinstance(epilogue, str) else epilogue
    rows, weight = (torch.randn(each, 1152, device=cuda, dtype=torch.bfloat16) for each in (fewer, 3456))
    bias = None if kind is Epilogue.NONE else torch.randn(3456, device=cuda, dtype=torch.bfloat16)
    exact = functional.linear(rows.float(), weight.float(), None if bias is None else bias.float())
    if kind is Epilogue.BIAS_TANH_GELU:
        exact = functional.gelu(exact, approximate="tanh")
    proposals = CublasLt(cuda).proposals(count, weight, kind, accumulates=adds)
    taken = [own for each in proposals if (own := each.resized(fewer, weight))]
    assert taken
    for own in taken:
        out = torch.full((fewer, 3456), 1.0 if adds else torch.nan, device=cuda, dtype=torch.bfloat16)
        own.run(rows, weight, bias, out)
        assert distance(out, exact + adds) <= torch.finfo(torch.bfloat16).eps


@torch.inference_mode()
@pytest.mark.parametrize(("count", "fewer"), [(384, 196), (1568, 1500)])
def test_a_forward_that_is_captured_later_takes_the_choices_for_more_rows(
    count: int, fewer: int, cuda: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton  # noqa: PLC0415 - there only where the tests run

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    layer = nn.Linear(1152, 1152, device=cuda, dtype=torch.bfloat16)
    rows, hidden = torch.randn(2, count, 1152, device=cuda, dtype=torch.bfloat16)
    products, stream = Products(), torch.cuda.Stream(cuda)
    recorder = CudaRecorder(stream)
    products.register(layer.weight)

    def forward(used: int) -> list[Tensor]:
        return [
            products.linear(rows[:used], layer.weight, layer.bias, gelu=True),
            products.add(hidden[:used].clone(), rows[:used], layer.weight),
            products.linear(rows[:used], layer.weight, layer.bias),
        ]

    results = [torch.full_like(each, torch.nan) for each in forward(fewer)]
    expected = [each.clone() for each in forward(fewer)]
    kept = recorder.record(lambda: forward(count).clear())  # with its memory pool
    tuned = dict(products._algorithms)
    products._algorithms |= {  # None is torch's
        size: None if size.accumulates else CublasLt(cuda).proposals(count, layer.weight, size.epilogue)[0]
        for size in tuned
    }

    def later() -> None:
        for target, each in zip(results, forward(fewer), strict=True):
            target.copy_(each)

    torch.cuda.synchronize()
    with recording(), torch.cuda.stream(stream):
        later()
    recorder.capture(later)()
    torch.cuda.synchronize()
    del kept
    for got, want in zip(results, expected, strict=True):
        assert distance(got, want) <= 2 * torch.finfo(torch.bfloat16).eps
    taken = {size.name for size, each in products._algorithms.items() if size.rows == fewer and each}
    assert taken == {name.replace(str(count), str(fewer), 1) for name in (size.name for size in tuned)}


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1025, 3136])
@pytest.mark.parametrize(("columns", "depth"), [(3456, 1152), (4304, 1152), (1152, 4304)])
@pytest.mark.parametrize("epilogue", list(Epilogue))
def test_quack_computes_products(
    epilogue: Epilogue,
    columns: int,
    depth: int,
    count: int,
    dtype: torch.dtype,
    cuda: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("quack")
    quack = quack_on(cuda)
    if quack is None:
        pytest.skip("needs Hopper")
    monkeypatch.setattr(quack_tiles, "_TIMED", len(quack_tiles.TILES))
    rows, weight = (torch.randn(each, depth, device=cuda, dtype=dtype) for each in (count, columns))
    bias, added = (
        30 * torch.randn(columns, device=cuda, dtype=dtype),
        torch.randn(count, columns, device=cuda).to(dtype),
    )
    exact = functional.linear(rows.float(), weight.float())
    exact += added.float() if epilogue is Epilogue.NONE else bias.float()
    if epilogue is Epilogue.BIAS_TANH_GELU:
        exact = functional.gelu(exact, approximate="tanh")
    plans = quack.plans(count, weight, epilogue)
    assert {plan.name for plan in plans} == {str(tile) for tile in quack_tiles.TILES}
    for plan in plans:
        out = added.clone() if epilogue is Epilogue.NONE else torch.full_like(added, torch.nan)
        plan.run(rows, weight, None if epilogue is Epilogue.NONE else bias, out)
        assert distance(out, exact) <= torch.finfo(dtype).eps
    assert not quack.plans(196, weight, epilogue)


@pytest.mark.parametrize(
    ("rows", "columns", "works"),
    [
        (3136, 3456, [98304, 92160, 86016, 86016]),  # 26 x 18, 25 x 24, 18 x 28 and 27 x 14 tiles
        (4096, 1152, [49152, 36864, 43008, 57344]),
        (128, 192, [24576, 18432, 21504, 28672]),  # one round
    ],
)
def test_the_work_of_tiles(rows: int, columns: int, works: list[int]) -> None:
    """Clusters are whole: 25 tiles of 128 rows are 26 if two of them share their inputs."""
    assert [tile.work(rows, columns, 132) for tile in quack_tiles.TILES] == works


QUACK = {
    "__init__": "",
    "cache": "CACHE_DIR = None",
    "activation": "gelu_tanh_approx = None",
    "gemm_config": "GemmConfig = dict",
    "epilogue/__init__": "",
    "epilogue/ops": "RowVecLoad = str",
    "epilogue/frontend": """
class Kernel:
    def plan(self, rows, weight, *, out, config, bias=None, C=None): return self
    def run(self, rows, weight, *, out, bias=None, C=None): pass
def gemm_epilogue(*, ops): return lambda traced: Kernel()
""",
}
"""As much of quack as is used."""


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({}, None),
        ({"gemm_config": None}, "quack.gemm_config"),
        ({"cache": ""}, "CACHE_DIR"),
        ({"epilogue/frontend": "def gemm_epilogue(): pass"}, "ops"),
        ({"gemm_config": "def GemmConfig(**fields): raise KeyError('pingpong')"}, "pingpong"),
        ({"epilogue/frontend": QUACK["epilogue/frontend"].replace("weight, *,", "weight, alpha, *,", 1)}, "alpha"),
        ({"epilogue/frontend": QUACK["epilogue/frontend"].replace("def run", "def launch")}, "'run'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_release_of_quack_is_not_used(
    changed: dict[str, str | None],
    name: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for module, source in (QUACK | changed).items():
        path = tmp_path / "quack" / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        if source is not None:
            path.write_text(source)
    metadata = tmp_path / "quack_kernels-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: quack-kernels\nVersion: 1.0\n")
    for module in [each for each in sys.modules if each.partition(".")[0] == "quack"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: HOPPER)
    quack = quack_on(torch.device("cuda"))
    weight = torch.empty(32, 16)
    plans = [quack.plans(2048, weight, each) for each in Epilogue] if quack else []
    assert any(plans) is (name is None)
    assert len(caplog.messages) == (name is not None)
    assert (name or "") in caplog.text
    for module in [each for each in sys.modules if each.partition(".")[0] == "quack"]:
        monkeypatch.delitem(sys.modules, module)


class Merging(nn.Module):
    """As a tower with mergers of inner layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.deepstack_merger_list = nn.ModuleList(nn.Linear(256, 512) for _ in range(2))
        self.merger = nn.Linear(256, 512)

    def forward(self, rows: Tensor) -> Tensor:
        inner = []
        for number, block in enumerate(self.blocks):
            rows = rows + functional.gelu(block(rows))
            if number < len(self.deepstack_merger_list):
                inner.append(self.deepstack_merger_list[number](rows))
        return torch.cat([self.merger(rows), *inner], dim=-1)


@torch.inference_mode()
@pytest.mark.parametrize("count", [40, 600])
def test_mergers_beside_the_blocks(count: int, cuda: torch.device) -> None:
    model = Merging().to(cuda, torch.bfloat16)
    rows, out = torch.empty(count, 256, device=cuda, dtype=torch.bfloat16), torch.empty(count, 1536, device=cuda)
    plain = torch.randn(3, count, 256, device=cuda).bfloat16().unbind()
    expected = [model(each).float() for each in plain]
    assert hasten_mergers(model, list(model.blocks)) == 3

    def forward() -> None:
        out.copy_(model(rows))

    replay = CudaRecorder(torch.cuda.Stream(cuda)).record(forward)
    for given, want in zip(plain, expected, strict=True):
        rows.copy_(given)
        replay()
        torch.cuda.synchronize()
        assert distance(out, want) <= 2 * torch.finfo(torch.bfloat16).eps


@torch.inference_mode()
def test_a_recording_that_failed_leaves_nothing_to_join(cuda: torch.device) -> None:
    """Without inner mergers, the next one would else wait for a stream that it did not begin."""
    model, recorder = Merging().to(cuda, torch.bfloat16), CudaRecorder(torch.cuda.Stream(cuda))
    hasten_mergers(model, list(model.blocks))
    rows = torch.zeros(40, 256, device=cuda, dtype=torch.bfloat16)
    recorder.record(lambda: model(rows))

    def failing() -> None:
        model.deepstack_merger_list[0](rows)
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError):
        recorder.capture(failing)
    recorder.capture(lambda: model.merger(rows))()
    torch.cuda.synchronize()


def test_choices_are_kept_for_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "choices.json"
    assert Choices(path).get("196x1152x1152") is None
    Choices(path).put("196x1152x1152", "beef")
    Choices(path).put("49x1152x1152", "")
    assert (Choices.read(path).get("196x1152x1152"), Choices.read(path).get("49x1152x1152")) == ("beef", "")
    path.write_text("[", encoding="utf-8")
    assert Choices.read(path).get("49x1152x1152") is None
