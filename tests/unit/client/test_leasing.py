"""Leases of items whose rows the server announces, from a real pool."""

from contextlib import closing

import pytest

from entered import entered
from vitwire._delivery.answers import Expected
from vitwire._delivery.leases import Pool
from vitwire._delivery.nixl import Leases, Leasing, Nixl
from vitwire.shared.agents import is_installed

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")
PAGE = 4096

nixl = entered(lambda: closing(Nixl("nixl", None, 4 * PAGE)), scope="function")


@pytest.fixture
def pool(nixl: Nixl) -> Pool:
    pool = nixl.pool()
    assert pool
    return pool


def late(nixl: Nixl) -> Leases:
    """An item of a page per row, which has its header sent, its two rows announced and its region sent."""
    leases = Leasing(nixl, 4).leases([Expected(width=PAGE // 4)], [0])
    assert leases
    leases.announced(0, 2)
    region = leases.next_region(1, wait=1)
    assert region
    assert (region.item, region.region.bytes) == (0, 2 * PAGE)
    return leases


def test_a_region_that_the_server_no_longer_awaited_is_free_and_no_failure(nixl: Nixl, pool: Pool) -> None:
    late(nixl).returned(0, "")
    assert nixl.pool() is pool, "NIXL is not paused"
    assert pool.abandoned == 0
    assert pool.lease(4 * PAGE)


def test_a_server_without_room_costs_one_delivery(nixl: Nixl, pool: Pool) -> None:
    """Whether the region was leased before the item was sent or late."""
    leases = Leasing(nixl, 4).leases([Expected(rows=2, width=PAGE // 4)])
    assert leases
    for each in (leases, late(nixl)):
        each.returned(0, "busy")
    assert nixl.pool() is pool, "NIXL is not paused"
    assert pool.abandoned == 0
    assert pool.lease(4 * PAGE)


def test_a_region_that_the_server_tried_is_abandoned(nixl: Nixl, pool: Pool) -> None:
    late(nixl).returned(0, "timeout")
    assert pool.abandoned == 2 * PAGE
    assert nixl.pool() is None, "paused"


def test_a_region_that_was_sent_is_not_used_again_if_the_attempt_is_refused(nixl: Nixl, pool: Pool) -> None:
    """The server announced the rows, so it may be writing them."""
    late(nixl).release()
    assert pool.abandoned == 2 * PAGE
    assert pool.lease(4 * PAGE) is None
