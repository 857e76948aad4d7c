"""What a session holds for each of its items."""

from dataclasses import dataclass

from vitwire_server.caching.cache import Name
from vitwire_server.caching.single_flight import Joining, SingleFlight, Waiter
from vitwire_server.core.delivery import Region
from vitwire_server.core.errors import EncoderError
from vitwire_server.scheduling.admission import Permit


@dataclass(slots=True)
class Held:
    """One item, from its admission until its release."""

    permit: Permit | None = None
    waiter: Waiter | None = None
    """Until the outcome is known; None where nothing is cached."""
    submitted: bool = False
    region: Region | None = None
    store_only: bool = False
    expected: Name | None = None
    """Of an item with pixels, while others may wait for it."""
    joining: Joining | None = None
    """Of an item without pixels, while it waits for another."""

    def expect(self, single_flight: SingleFlight, name: Name | None) -> None:
        """Let items without pixels wait for this one from now on, if it has a name."""
        if single_flight.is_on and self.expected is None and name:
            self.expected = name
            single_flight.expect(name)

    def settled(self, single_flight: SingleFlight, error: EncoderError | None = None) -> None:
        """The item has its outcome, or none will come."""
        name, self.expected = self.expected, None
        if name:
            single_flight.settled(name, error)

    def give_back(self, single_flight: SingleFlight) -> None:
        """The item is over."""
        if self.joining:
            single_flight.quit(self.joining)
        self.settled(single_flight)
        if self.permit:
            self.permit.release()
