"""The models that tests run over, and the fixture that writes their checkpoints."""

from collections.abc import Callable
from pathlib import Path

import transformers
from packaging.version import Version

from vitwire_server.towers.registry import FAMILIES

_INSTALLED = Version(transformers.__version__)
MODEL_TYPES = [name for name, row in FAMILIES.items() if Version(row.transformers) <= _INSTALLED]
"""Rows of the table that the installed transformers can compute."""
Checkpoints = Callable[[str], Path]
"""From a model_type to the directory of its tiny checkpoint."""
