"""The exchange of one part of a request over all its attempts, without I/O, for both clients."""

from dataclasses import replace
from typing import Any

from vitwire._delivery.answers import Accepted, Answer, Response
from vitwire._delivery.assembler import Assembler
from vitwire._transport.attempts import Attempts
from vitwire._transport.balancing import CONTENT_HEADER
from vitwire._transport.connections import C, Connection
from vitwire._transport.context import log
from vitwire._transport.protocol import Part
from vitwire.embeddings import RowGroup
from vitwire.errors import (
    DeadlineExceeded,
    EncodeFailed,
    InvalidItem,
    Overloaded,
    Unauthenticated,
    Unavailable,
    VitwireError,
)
from vitwire.model import Model
from vitwire.v1 import encoder_pb2 as pb
from vitwire.wire import Malformed


class Exchange:
    """Tracks the items not yet answered, so that a retry sends only those. Encoding twice is harmless."""

    def __init__(self, part: Part, attempts: Attempts, request_id: str = "") -> None:
        self.part = part
        """The items that the next attempt sends."""
        self.attempts = attempts
        self.hint = part.share.hint
        """Sent with the first attempt only: the replica that it leads to did not answer, or is full."""
        self._request_id = request_id
        self._answered: set[int] = set()
        self._overloaded: dict[int, Overloaded] = {}
        self._grouped = dict.fromkeys(part.indices if part.options.in_groups else (), 0)

    @property
    def is_routed(self) -> bool:
        """Whether the hint decides about the replica of the next attempt."""
        return self.part.share.is_routed and self.hint is not None

    def metadata(self, of_request: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        """Metadata of the next attempt; a hint of the caller is kept."""
        if self.hint is None or any(key == CONTENT_HEADER for key, _ in of_request):
            return of_request
        return (*of_request, (CONTENT_HEADER, self.hint))

    def begin(self) -> bool:
        """Start an attempt; False if it has to wait for memory that other requests lease."""
        self.close()
        part = self.part.without(self._answered)
        leasing = part.options.leasing
        leases = leasing.leases(part.expected, part.late) if leasing else None
        if leasing and leases is None:
            return False
        self.part = replace(part, leases=leases)
        self._overloaded.clear()
        self._assembler = Assembler(
            self.part.indices,
            part.model.deepstack_levels,
            self.part.expected,
            leases,
            self._request_id,
            store_only=part.options.store_only,
            grouped=self._grouped,
        )
        return True

    def check_deadline(self) -> None:
        """There is no room yet. Raises DeadlineExceeded."""
        try:
            self.attempts.left()
        except DeadlineExceeded as error:
            advice = "the memory for NIXL delivery is in use: release embeddings, or raise delivery_bytes"
            raise DeadlineExceeded(f"{error}; {advice}", code=error.code) from None

    def close(self) -> None:
        """The attempt is over: the server may still write rows of items that it did not answer."""
        if self.part.leases:
            self.part.leases.abandon()

    def feed(self, response: Response) -> Answer | None:
        """The result that this response completes. Items to retry later are held back."""
        result = self._assembler.feed(response)
        if result is None:
            return None
        index, outcome = result
        if isinstance(outcome, Accepted | RowGroup):
            return result
        if isinstance(outcome, Overloaded) and outcome.retry_after is not None:
            self._overloaded[index] = outcome
            return None
        self._answered.add(index)
        self.attempts.answered()
        return result

    @property
    def is_complete(self) -> bool:
        """Whether every item is answered: how the attempt ended then does not matter, and there is nothing to send."""
        return self._answered.issuperset(self.part.indices)

    def unanswered(self, connection: Connection[C]) -> Connection[C] | None:
        """After an attempt that the server did not accept: the connection for the next one, None for any."""
        self.hint = None
        log.info("request %s: the server did not accept it in time; sending it again", self._request_id)
        if not self.attempts.unanswered():
            return connection
        connection.avoid()
        return None

    def failed(self, failure: VitwireError, connection: Connection[Any]) -> float:
        """After an attempt that failed as a whole: seconds until the next one. Raises the failure if there is none.

        A server whose receive slots are in demand waits a second for a large message, but takes a stream's at once.
        """
        if isinstance(failure, InvalidItem | Overloaded | Unauthenticated) and self.part.leases and not self._answered:
            self.part.leases.release()  # the server refused the request as a whole
        if isinstance(failure, Unavailable):
            connection.avoid()
        self.hint = None
        delay = self.attempts.delay(failure)
        log.info("request %s: %s; sending it again in %.1f s", self._request_id, failure, delay)
        if isinstance(failure, Overloaded):
            self.part = self.part.yielding()
        return delay

    def finish(self) -> float | None:
        """End an attempt: seconds until the next one, if items were held back and retries are left, else None.

        Raises EncodeFailed if items are missing.
        """
        self._assembler.finish()
        self.hint = None
        if not self._overloaded:
            return None
        try:
            delay = self.attempts.delay(max(self._overloaded.values(), key=lambda error: error.retry_after or 0.0))
        except Overloaded:
            return None
        log.info(
            "request %s: the server refused %d items; sending them again in %.1f s",
            self._request_id, len(self._overloaded), delay,
        )  # fmt: skip
        return delay

    def refused(self) -> list[Answer]:
        """After the last attempt: the items that the server refused."""
        return list(self._overloaded.items())


def model_of(message: pb.GetModelResponse | Malformed) -> Model:
    """The model from a server's description. Raises EncodeFailed for an invalid description."""
    if isinstance(message, Malformed):
        raise EncodeFailed(f"the server's description of its model cannot be parsed: {message.reason}")
    try:
        return Model.from_message(message)
    except ValueError as error:
        raise EncodeFailed(f"the server's description of its model is invalid: {error}") from None


def may_mean_other_model(error: VitwireError) -> bool:
    """Whether the error may mean that the server has another model than the client has cached."""
    return isinstance(error, InvalidItem | EncodeFailed) and error.code != "CANCELLED"
