"""Rewritten modules against those that they replace."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionMLP, Qwen3VLVisionPatchMerger
from transformers.models.siglip2.modeling_siglip2 import Siglip2MLP

from vitwire_server.towers.rewrites import PatchProjection, aligned_mlps, linear_patches


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv3d])
def test_a_convolution_of_whole_patches_is_a_matrix_product(kind: type[nn.Conv2d | nn.Conv3d]) -> None:
    size = (4,) * (2 if kind is nn.Conv2d else 3)
    model = nn.Sequential(kind(3, 8, size, stride=size))
    patches, images = torch.randn(5, 3, *size), torch.randn(2, 3, *(2 * side for side in size))
    expected, tiled = model(patches), model(images)
    assert linear_patches(model) == 1
    assert isinstance(model[0], PatchProjection)
    torch.testing.assert_close(model(patches), expected)
    torch.testing.assert_close(model(images), tiled)
    assert linear_patches(model) == 0, "once is enough"


@pytest.mark.parametrize(("inner", "widened"), [(3420 // 20, 192), (160, 192), (192, 192)])
def test_gated_mlps_are_widened_with_nothing(inner: int, widened: int) -> None:
    class Config:
        hidden_size, intermediate_size, hidden_act = 64, inner, "silu"

    mlp = Qwen2_5_VLMLP(Config(), bias=True).requires_grad_(requires_grad=False)
    rows = torch.randn(7, 64)
    expected = mlp(rows)
    assert aligned_mlps(nn.ModuleList([mlp])) == (inner != widened)
    assert mlp.gate_proj.out_features == mlp.down_proj.in_features == widened
    torch.testing.assert_close(mlp(rows), expected)


@pytest.mark.parametrize(
    ("activation", "inner", "widened"),
    [("gelu_pytorch_tanh", 160, 192), ("quick_gelu", 160, 192), ("gelu", 192, 192), ("sigmoid", 160, 160)],
)
@pytest.mark.parametrize("kind", [Qwen3VLVisionMLP, Siglip2MLP])
def test_plain_mlps_are_widened_if_their_activation_keeps_zeros(
    kind: type[nn.Module], activation: str, inner: int, widened: int
) -> None:
    mlp = kind(SimpleNamespace(hidden_size=64, intermediate_size=inner, hidden_act=activation))
    mlp.requires_grad_(requires_grad=False)
    rows = torch.randn(7, 64)
    expected = mlp(rows)
    assert aligned_mlps(nn.ModuleList([mlp])) == (inner != widened)
    first, last = (part for part in mlp.children() if isinstance(part, nn.Linear))
    assert first.out_features == last.in_features == widened
    torch.testing.assert_close(mlp(rows), expected)


def test_only_mlps_are_widened() -> None:
    config = SimpleNamespace(hidden_size=24, spatial_merge_size=2, out_hidden_size=40)
    merger, unknown = Qwen3VLVisionPatchMerger(config), nn.Module()
    unknown.fc1, unknown.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
    assert aligned_mlps(nn.ModuleList([merger, unknown])) == 0, "one has a norm, the other an unknown activation"
