"""Rewritten modules against those that they replace."""

import pytest
import torch
from torch import nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP

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


@pytest.mark.parametrize(("inner", "widened"), [(3420 // 20, 192), (160, 160)])
def test_gated_mlps_are_widened_with_nothing(inner: int, widened: int) -> None:
    class Config:
        hidden_size, intermediate_size, hidden_act = 64, inner, "silu"

    mlp = Qwen2_5_VLMLP(Config(), bias=True).requires_grad_(requires_grad=False)
    rows = torch.randn(7, 64)
    expected = mlp(rows)
    assert aligned_mlps(nn.ModuleList([mlp])) == (inner != widened)
    assert mlp.gate_proj.out_features == mlp.down_proj.in_features == widened
    torch.testing.assert_close(mlp(rows), expected)
