"""Bounds of files and pictures."""

MAX_PICTURE_PIXELS = 89_478_485
"""Pixels of a picture, whatever the settings allow: a quarter of a GiB as RGB, where Pillow starts to warn."""
