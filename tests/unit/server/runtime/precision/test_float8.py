"""Linear layers in float8 against float32, how similarity is measured, and the pictures that it is measured on.

A normal number in e4m3 has 3 bits after the leading one: it is rounded by at most 2^-4 of itself, and if all remainders
are as likely, by 2.6 % in norm. Both factors of a product are rounded independently, so it is wrong by 3.7 % in norm.
"""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from prepared import recipe
from vitwire_server.config.settings import ServeSettings
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.models import Geometry, Precision
from vitwire_server.preparing.rules.patches import patch_rows
from vitwire_server.process.computing import fingerprint
from vitwire_server.runtime.precision import float8
from vitwire_server.runtime.precision.float8 import Float8Linear, device_fault, quantised, reduce, replacements
from vitwire_server.runtime.precision.similarity import dead_leaves, least_cosines, norm_errors, picture_items

ROUNDING = 2**-4
BF16 = torch.bfloat16


def linear(columns: int, channels: int, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(columns, channels, dtype=dtype).requires_grad_(requires_grad=False)
    nn.init.normal_(layer.weight)
    return layer


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class TestRows:
    @pytest.mark.parametrize("size", [1.0, 1e-9, 1e30])
    def test_each_value_is_rounded_by_a_sixteenth_at_most(self, size: float) -> None:
        rows = torch.randn(64, 1152) * size
        values, scales = quantised(rows)
        error = (values.float() * scales - rows).abs()
        assert bool((error <= (ROUNDING + 1e-6) * rows.abs() + 2**-10 * scales).all())
        assert 0.02 < distance(values.float() * scales, rows) < 0.03
        assert bool((values.float().abs().amax(1) == 448).all()), "the whole range is used"

    def test_an_outlier_costs_the_others_no_precision(self) -> None:
        rows = torch.randn(64, 1152)
        rows[:, 5] = 3000  # 12 bits above the others; e4m3 has 15 binades
        values, scales = quantised(rows)
        rest = torch.arange(1152) != 5
        assert distance((values.float() * scales)[:, rest], rows[:, rest]) < 0.03

    def test_rows_of_zeros_stay_zeros(self) -> None:
        values, scales = quantised(torch.zeros(3, 64))
        assert not values.float().any()
        assert bool((scales > 0).all())
        layer = linear(64, 32, BF16)
        expected = layer.bias.expand(3, 32)
        torch.testing.assert_close(Float8Linear.of(layer)(torch.zeros(3, 64, dtype=BF16)), expected)


class TestLayers:
    @pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
    def test_a_product_is_within_the_bound_of_its_factors(self, dtype: torch.dtype) -> None:
        layer, rows = linear(1152, 256, dtype), torch.randn(2, 50, 1152).to(dtype)
        got, exact = Float8Linear.of(layer)(rows), layer.float()(rows.float())
        assert got.dtype is dtype
        assert got.shape == exact.shape
        most = (2 * ROUNDING + ROUNDING**2 + 2**-8) * (rows.float().abs() @ layer.weight.float().abs().t())
        assert bool(((got.float() - exact).abs() <= most + 0.01 * exact.abs()).all())
        assert 0.03 < distance(got, exact) < 0.045

    @pytest.mark.parametrize("lost", [torch.nan, torch.inf, -torch.inf])
    def test_what_is_not_finite_stays_in_its_row(self, lost: float) -> None:
        layer, rows = Float8Linear.of(linear(64, 32, BF16)), torch.randn(5, 64, dtype=BF16)
        before = layer(rows)
        rows[2, 7] = lost
        after = layer(rows)
        assert not after[2].isfinite().any()
        assert torch.equal(after[[0, 1, 3, 4]], before[[0, 1, 3, 4]])

    def test_a_large_output_channel_changes_no_other(self) -> None:
        layer, rows = linear(64, 32), torch.randn(5, 64)
        before = Float8Linear.of(layer)(rows)
        layer.weight[3] *= 1e6
        after = Float8Linear.of(layer)(rows)
        others = torch.arange(32) != 3
        assert torch.equal(after[:, others], before[:, others])
        assert distance(after[:, 3], layer(rows)[:, 3]) < 0.1

    @pytest.mark.parametrize("bias", [True, False])
    def test_joined_layers_give_the_columns_of_each(self, bias: bool) -> None:
        layers = [Float8Linear.of(nn.Linear(64, channels, bias=bias)) for channels in (32, 48)]
        rows = torch.randn(5, 64)
        apart = [layer(rows) for layer in layers]
        assert torch.equal(Float8Linear.joined(*layers)(rows), torch.cat(apart, 1))
        for layer, own in zip(layers, apart, strict=True):
            assert torch.equal(layer(rows), own)

    def test_blocks_keep_the_layer_after_attention_and_widths_that_do_not_fit(self) -> None:
        block = nn.ModuleDict(
            {
                "attn": nn.ModuleDict({"qkv": linear(64, 192), "proj": linear(64, 64)}),
                "mlp": nn.ModuleDict({"fc1": linear(64, 88), "gate_proj": linear(64, 96)}),
                "self_attn": nn.ModuleDict({"o_proj": nn.ModuleDict({"linear": linear(64, 64)})}),
            }
        )
        assert [(each.name, each.of_attention) for each in replacements(block)] == [("qkv", True), ("gate_proj", False)]
        assert reduce(block) == 2
        found = {name for name, layer in block.named_modules() if isinstance(layer, Float8Linear)}
        assert found == {"attn.qkv", "mlp.gate_proj"}
        assert reduce(block) == 0, "once is enough"


@pytest.mark.parametrize(("capability", "served"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_devices_without_float8_are_named(
    capability: tuple[int, int], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float8.torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(float8.torch.cuda, "get_device_name", lambda _: "A100")
    fault = device_fault(torch.device("cuda", 0))
    assert fault == ("" if served else "A100 has no float8 products (compute capability 8.0, 8.9 is needed)")
    assert not device_fault(torch.device("cpu"))


class TestSimilarity:
    def test_the_worst_part_of_a_row_counts(self) -> None:
        before = torch.randn(100, 3 * 64)
        after = before.clone()
        after[7, 64:128] = -before[7, 64:128]
        cosines = least_cosines(before, after, parts=3)
        assert cosines.shape == (100,)
        assert float(cosines[7]) == pytest.approx(-1)
        assert float(cosines.min()) == float(cosines[7])
        assert float(cosines.median()) == pytest.approx(1)

    def test_length_does_not_matter_and_direction_does(self) -> None:
        before = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
        after = torch.tensor([[5.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [torch.nan, 0.0]])
        got = least_cosines(before, after, parts=1)
        torch.testing.assert_close(got[:4], torch.tensor([1, 2**-0.5, 1, 0], dtype=torch.float64))
        assert got.isnan().tolist() == [False] * 4 + [True]
        assert got.min().isnan(), "a row that is not finite is below every floor"

    def test_norm_errors_see_length_too(self) -> None:
        before = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
        after = torch.tensor([[3.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [torch.nan, 0.0]])
        got = norm_errors(before, after, parts=1)
        assert got[:4].tolist() == [0.5, 1.0, 0.0, torch.inf]
        assert got.max().isnan(), "a row that is not finite is above every bound"
        assert norm_errors(before[:2].view(1, -1), after[:2].view(1, -1), parts=2).tolist() == [1.0], "the worst part"


def test_rows_of_another_precision_have_another_fingerprint() -> None:
    reduced = fingerprint("ab", Precision("float8_e4m3fn", 12, 0.9995, 0.9999))
    assert fingerprint("ab", None) == "ab"
    assert reduced != "ab"
    assert reduced == fingerprint("ab", Precision("float8_e4m3fn", 12, 0.9993, 0.9999)), "what is measured may vary"
    some = {
        fingerprint("ab", Precision("float8_e4m3fn", 6, 0.9995, 0.9999, blocks)) for blocks in ("0-3", "0-2,attn:5")
    }
    assert len(some | {reduced, "ab"}) == 4, "other blocks in float8 give other rows"


def test_float8_needs_bfloat16_and_forwards_that_are_not_compiled() -> None:
    with pytest.raises(ValueError, match="--precision fp8 needs --dtype auto or bfloat16, not float32"):
        ServeSettings(model="m", precision="fp8", dtype="float32")
    with pytest.raises(ValueError, match="--precision fp8 and --compile on cannot be used together"):
        ServeSettings(model="m", precision="fp8", compile="on")
    with pytest.raises(ValueError, match="--precision-floor needs --precision fp8"):
        ServeSettings(model="m", precision_floor=0.99)
    with pytest.raises(ValueError, match="--precision-blocks needs --precision fp8"):
        ServeSettings(model="m", precision_blocks="all")
    assert ServeSettings(model="m").precision == "auto"


class TestPictures:
    def test_they_have_the_spectrum_of_photographs(self) -> None:
        """Their amplitude falls about as 1/f."""
        picture = dead_leaves(256, 256, torch.Generator().manual_seed(0)).float().mean(0)
        amplitude = torch.fft.fft2(picture).abs()
        cycles = torch.fft.fftfreq(256) * 256
        radius = (cycles[:, None] ** 2 + cycles**2).sqrt().round()
        low, high = (float(amplitude[radius == each].mean()) for each in (4, 64))
        assert -1.7 < np.log(high / low) / np.log(64 / 4) < -0.7
        assert picture.std() > 30

    @pytest.mark.parametrize("raster", [False, True])
    @pytest.mark.parametrize("channels_last", [False, True])
    def test_patches_lie_as_the_client_sends_them(self, raster: bool, channels_last: bool) -> None:
        geometry = Geometry(14, 2, 2, 3, 64, 0, raster=raster, channels_last=channels_last)

        class Tower:
            def __init__(self) -> None:
                self.geometry = geometry

            def footprint(self, grid: Grid) -> Footprint:
                return Footprint(grid.patches, grid.patches // 4, 1, grid.patches)

        (item,) = picture_items(Tower(), [Grid(1, 4, 6)])
        picture = dead_leaves(56, 84, torch.Generator().manual_seed(0)).permute(1, 2, 0).contiguous().numpy()
        own = recipe(patch=14, merge=2, raster=raster, channels_last=channels_last)
        rows, grid = patch_rows([picture], (56, 84), (1, 1), own)
        assert tuple(item.grid) == grid
        assert item.pixels.shape == rows.shape
        assert bytes(item.pixels.data) == rows.tobytes()
