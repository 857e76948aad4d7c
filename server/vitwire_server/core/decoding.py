"""Bounds of files and pictures."""

MAX_PICTURE_PIXELS = 89_478_485
"""Pixels of a picture, whatever the settings allow: a quarter of a GiB as RGB, where Pillow starts to warn."""
CLIP_FRAMES_BYTES = 512 << 20
"""Most bytes of the chosen frames of a clip in RGB, for a decoder on the device."""
CLIP_TENSORS_BYTES = 2 * CLIP_FRAMES_BYTES
"""Most bytes of torch's tensors in a process that decodes clips on a CUDA device."""
CLIP_DECODERS_BYTES = 1 << 30
"""Set aside for its decoders; with context and tensors it held 1.6 GiB after clips of three sizes on an H200."""
