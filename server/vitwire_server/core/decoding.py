"""Bounds of files and pictures."""

MAX_PICTURE_PIXELS = 89_478_485
"""Pixels of a picture, whatever the settings allow: a quarter of a GiB as RGB, where Pillow starts to warn."""
CLIP_FRAMES_BYTES = 512 << 20
"""Of the chosen frames of a clip in RGB, for a decoder on the device."""
CLIP_TENSORS_BYTES = 2 * CLIP_FRAMES_BYTES
"""Of a process that decodes clips on a CUDA device, for torch's tensors."""
CLIP_DECODERS_BYTES = 1 << 30
"""Of such a process, for its decoders: at most 700 MiB were measured, after clips of three sizes on an H200."""
