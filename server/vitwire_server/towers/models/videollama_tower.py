"""VideoLLaMA 3's tower without its last step."""

from torch import Tensor
from transformers.models.video_llama_3.modeling_video_llama_3 import VideoLlama3VisionModel


class UnmergedTower(VideoLlama3VisionModel):
    """Rows of patches, which the stock tower merges item by item, by numbers that it reads on the host."""

    def pixel_unshuffle(self, hidden_states: Tensor, grid_thw: Tensor, merge_sizes: Tensor) -> Tensor:
        """Merges nothing."""
        del grid_thw, merge_sizes
        return hidden_states
