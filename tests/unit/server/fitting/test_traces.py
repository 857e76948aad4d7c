"""Traces that the server records."""

import logging
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.fitting.traces import TraceError, TraceWriter, read_trace


def item(modality: Modality, grid: Grid) -> Item:
    pixels = Pixels(b"", DType.UINT8, (grid.patches, 0))
    return Item(
        modality, grid, pixels, Footprint(grid.patches, grid.patches // 4, grid.t, grid.frame_patches), DType.UINT8
    )


IMAGE, CLIP = item(Modality.IMAGE, Grid(1, 4, 6)), item(Modality.VIDEO, Grid(3, 2, 2))


def test_what_was_recorded_is_read_back_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for requests in ([[IMAGE, CLIP], []], [[CLIP]]):
        trace = TraceWriter(path)
        for items in requests:
            trace.record(items)
        trace.close()
        trace.record([IMAGE])
    assert read_trace(path, merge=2) == [IMAGE.footprint, CLIP.footprint, CLIP.footprint]
    assert (
        path.read_text()
        .splitlines()[0]
        .endswith('"items": [{"modality": "image", "grid": [1, 4, 6]}, {"modality": "video", "grid": [3, 2, 2]}]}')
    )


def test_what_a_grid_does_not_tell_is_recorded_too(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.jsonl")
    tiles = replace(IMAGE, grid=Grid(13, 3, 4), footprint=Footprint(13, 1141, 13, 1, crops=12))
    trace.record([tiles, IMAGE])
    trace.close()
    assert read_trace(tmp_path / "trace.jsonl", merge=2) == [tiles.footprint, IMAGE.footprint]


@pytest.mark.parametrize(
    ("merge", "grid"), [(3, Grid(1, 6, 12)), (3, Grid(1, 9, 15)), (1, Grid(1, 6, 8)), (1, Grid(1, 5, 7))]
)
def test_tokens_that_are_not_quarters_of_patches_are_recorded(merge: int, grid: Grid, tmp_path: Path) -> None:
    footprint = Footprint(grid.patches, grid.patches // merge**2, grid.t, grid.frame_patches)
    trace = TraceWriter(tmp_path / "trace.jsonl")
    trace.record([replace(IMAGE, grid=grid, footprint=footprint)])
    trace.close()
    assert read_trace(tmp_path / "trace.jsonl", merge=2) == [footprint]


@pytest.mark.parametrize(
    "footprint", ['{"tokens": 4}', '{"patches": 1, "tokens": 0, "segments": 1, "longest": 1}', "[]x"]
)
def test_a_footprint_that_cannot_be_is_named_by_its_line(footprint: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"items": [{{"grid": [1, 2, 2], "footprint": {footprint}}}]}}')
    with pytest.raises(TraceError, match=r"trace\.jsonl:1"):
        read_trace(path, merge=2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file that is always full")
def test_a_full_disk_ends_the_recording_and_is_reported_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk."""
    trace = TraceWriter(tmp_path / "trace")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.ERROR):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            trace.record([IMAGE])
            trace.record([IMAGE])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [record.getMessage() for record in caplog.records] == [
        f"stopped recording to {tmp_path}/trace: [Errno 27] File too large"
    ]
