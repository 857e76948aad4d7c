"""Bounds of files and pictures."""

MAX_PICTURE_PIXELS = 89_478_485
"""Of a picture, whatever the settings allow: a quarter of a GiB as RGB, where Pillow starts to warn."""
