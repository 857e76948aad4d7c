"""From an item's outcome to its caller: its rows in the caller's memory, on the host for the response, or stored."""

from dataclasses import replace
from functools import partial

from vitwire_server.caching.single_flight import SingleFlight
from vitwire_server.core.delivery import Consumer, Delivered, Region, Stored
from vitwire_server.core.errors import EncodeFailed
from vitwire_server.core.reports import Encoded, Path
from vitwire_server.scheduling.tickets import Ticket
from vitwire_server.sessions.delivering import Courier, deliver, from_device, needs_host
from vitwire_server.sessions.mailbox import Mailbox
from vitwire_server.sessions.session import Settle


class Handover:
    """Settles the encoded items of one session, on its event loop.

    Rows that arrive after the ticket was cancelled settle nothing.
    """

    def __init__(
        self,
        single_flight: SingleFlight,
        courier: Courier | None,
        mailbox: Mailbox,
        consumer: Consumer | None,
        ticket: Ticket,
        settle: Settle,
    ) -> None:
        self._single_flight = single_flight
        self._courier = courier
        self._mailbox = mailbox
        self._consumer = consumer
        self._ticket = ticket
        self._settle = settle

    def stored(self, key: int, outcome: Encoded) -> None:
        """Settle an item whose rows are only stored."""
        self._settle(key, _without_rows(replace(outcome, delivery=Stored())))

    def hand_out(self, key: int, region: Region | None, outcome: Encoded) -> None:
        """Deliver the rows to the region, if there is one and that was not tried before, else settle the item."""
        embedding = outcome.embedding
        consumer = self._consumer if region and outcome.delivery is None else None
        if needs_host(embedding, consumer):
            assert embedding.device, "else they are on the host"
            self._single_flight.fetch(embedding.device, partial(self._fetched, key, region, outcome))
            return
        if region is None or consumer is None:
            self._settle(key, replace(outcome, embedding=replace(embedding, device=None)))
            return

        def done(delivered: Encoded) -> None:
            self._mailbox.post(lambda: self._delivered(key, region, delivered))

        deliver(self._courier, consumer, region, outcome, done)

    def _fetched(self, key: int, region: Region | None, outcome: Encoded, found: memoryview | EncodeFailed) -> None:
        if self._ticket.cancelled:
            return
        if isinstance(found, EncodeFailed):
            self._settle(key, found)
        else:
            embedding = replace(outcome.embedding, data=found, device=None)
            self.hand_out(key, region, replace(outcome, embedding=embedding))

    def _delivered(self, key: int, region: Region, outcome: Encoded) -> None:
        if self._ticket.cancelled:
            return
        if isinstance(outcome.delivery, Delivered):
            consumer = self._consumer
            if outcome.report.path is Path.CACHE and consumer and from_device(outcome.embedding, consumer):
                self._single_flight.served_from_device()
            self._settle(key, _without_rows(outcome))
        else:
            self.hand_out(key, region, outcome)


def _without_rows(outcome: Encoded) -> Encoded:
    """For the client, which gets none: their memory may be free before it has read that."""
    return replace(outcome, embedding=replace(outcome.embedding, data=memoryview(b""), device=None))
