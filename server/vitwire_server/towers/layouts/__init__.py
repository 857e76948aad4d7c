"""How pixels become one forward: packed patches, raster patches, tiles, two views."""
