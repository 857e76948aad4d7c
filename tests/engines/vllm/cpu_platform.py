"""Makes vLLM, which has no CPU build here, use its CPU platform. Import this before any other part of vLLM."""

import os

os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

import torch

# torchvision's compiled part does not load beside a CPU build of torch, and then these operators are missing.
for _name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

# On a processor with AMX vLLM would pack weights by `convert_weight_packed`, which only its CPU build has.
torch.cpu._is_amx_tile_supported = lambda: False

import vllm.platforms  # noqa: E402  # after its library
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

vllm.platforms._current_platform = CpuPlatform()

from vllm.model_executor.models import registry  # noqa: E402  # after the platform

registry._run_in_subprocess = lambda function: function()  # there, none of the above would hold
