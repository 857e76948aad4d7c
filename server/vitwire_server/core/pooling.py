"""Pooling of the rows of an image."""

from enum import StrEnum


class Pooling(StrEnum):
    """The result for an image, or a frame of a clip; the values are the options of `--pooling`."""

    NONE = "none"
    """Rows, as the tower returns them."""
    CLS = "cls"
    """One row: the class token."""
    MEAN = "mean"
    """One row: the mean of the rows."""
    ATTENTION = "attention"
    """One row, by the model's own attention pooling."""
