"""Where rows are to be written: the consumer of an RPC and the regions of its items, checked."""

from bisect import bisect
from collections.abc import Callable

from vitwire.shared.agents import problem_of
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.core.delivery import Consumer, MemoryKind, Region
from vitwire_server.core.errors import InvalidRequest, Violation

_KINDS = {pb.MEMORY_KIND_HOST: MemoryKind.HOST, pb.MEMORY_KIND_DEVICE: MemoryKind.DEVICE}


def consumer_of(message: pb.EncodeRequest | pb.EncodeStreamOptions, principal: str, field: str) -> Consumer | None:
    """The consumer of an RPC; None if its rows come in the response. Raises InvalidRequest."""
    if not message.HasField("delivery"):
        return None
    delivery = message.delivery
    kind = _KINDS.get(delivery.memory)
    consumer = Consumer(
        principal,
        delivery.agent,
        delivery.agent_metadata,
        kind or MemoryKind.HOST,
        delivery.device,
        delivery.address,
        delivery.bytes,
    )
    wrong = {
        "memory": None if kind else "must be HOST or DEVICE",
        "agent": problem_of(delivery.agent, delivery.agent_metadata),
        "address": consumer.problem(),
    }
    violations = [Violation(f"{field}.{name}", reason) for name, reason in wrong.items() if reason]
    if violations:
        raise InvalidRequest(violations)
    return consumer


def region_of(item: pb.Item | pb.EncodeStreamRegion) -> Region | None:
    """The region of an item, unchecked."""
    return Region(item.region.offset, item.region.bytes) if item.HasField("region") else None


def wrong_region(region: Region | None, consumer: Consumer | None, needed: int) -> list[Violation]:
    """What is wrong with the region of an item whose rows have `needed` bytes."""
    if region is None:
        return []
    reason = region.problem(consumer, needed) if consumer else "needs the delivery of the request"
    return [Violation("region", reason)] if reason else []


class Claims:
    """The regions of items in flight, of all RPCs of this process. No two of a consumer overlap."""

    def __init__(self) -> None:
        self._spans: dict[tuple[str, str], list[tuple[int, int]]] = {}
        """First address and end of each region, ascending."""

    def take(self, consumer: Consumer, region: Region) -> Callable[[], None] | None:
        """Claim a region; returns what gives it back, once. None if it overlaps with one that is claimed."""
        owner = consumer.principal, consumer.agent
        spans = self._spans.setdefault(owner, [])
        start = consumer.address + region.offset
        span = start, start + region.nbytes
        at = bisect(spans, span)
        if (at and spans[at - 1][1] > start) or (at < len(spans) and spans[at][0] < span[1]):
            return None
        spans.insert(at, span)

        def give_back() -> None:
            spans.remove(span)
            if not spans:
                del self._spans[owner]

        return give_back
