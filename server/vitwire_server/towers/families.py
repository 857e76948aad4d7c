"""The table of models: one row per `model_type`."""

from collections.abc import Mapping
from types import MappingProxyType

from vitwire_server.towers.family import Family
from vitwire_server.towers.navit_rows import NAVIT_ROWS
from vitwire_server.towers.packed_rows import PACKED_ROWS
from vitwire_server.towers.tile_rows import TILE_ROWS

_ROWS: tuple[Family, ...] = (*PACKED_ROWS, *TILE_ROWS, *NAVIT_ROWS)

FAMILIES: Mapping[str, Family] = MappingProxyType({row.model_type: row for row in _ROWS})
