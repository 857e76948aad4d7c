"""Messages to SGLang's receivers over ZMQ."""

import asyncio
import ipaddress
from collections.abc import Sequence
from http import HTTPStatus

import numpy as np
import numpy.typing as npt
import zmq
import zmq.asyncio

from vitwire.integrations.sglang.parts import Refused

Frame = bytes | npt.NDArray[np.uint8]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_POLL_SECONDS = 0.005
_LINGER_MS = 5000
"""Small messages may still be in ZMQ's buffers when they count as sent."""


class Pusher:
    """Sends each message on a connection of its own; a receiver that takes too long fails only its message.

    networks: receivers must be in one of them, by address; empty for any receiver.
    """

    def __init__(self, seconds: float, networks: Sequence[Network] = ()) -> None:
        self._seconds = seconds
        self._networks = tuple(networks)
        self._context = zmq.asyncio.Context()

    async def push_all(self, endpoints: Sequence[str], frames: Sequence[Frame]) -> None:
        """Send to every receiver, all at a time. Raises Refused if one did not take the message."""
        outcomes = await asyncio.gather(*(self._push(each, frames) for each in endpoints), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def check(self, endpoint: str) -> None:
        """Raises Refused for a receiver that is not in the networks."""
        if not self._networks:
            return
        host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            raise Refused(f"receiver {host}: expected an IP address, as receivers are limited to networks") from None
        if not any(address.version == each.version and address in each for each in self._networks):
            raise Refused(f"receiver {host} is not in a network that embeddings may be sent to")

    def close(self) -> None:
        """Drop the connections, at once."""
        self._context.destroy(linger=0)

    async def _push(self, endpoint: str, frames: Sequence[Frame]) -> None:
        self.check(endpoint)
        socket = self._context.socket(zmq.PUSH)
        linger = 0
        try:
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # wait for the connection instead of queueing for it
            socket.setsockopt(zmq.IPV6, "[" in endpoint)
            socket.connect(endpoint)
            async with asyncio.timeout(self._seconds):
                tracker = await socket.send_multipart(frames, copy=False, track=True)
                while tracker is not None and not tracker.done:  # noqa: ASYNC110  # set by ZMQ's thread
                    await asyncio.sleep(_POLL_SECONDS)
            linger = _LINGER_MS
        except TimeoutError as error:
            message = f"receiver {endpoint} did not take the embedding within {self._seconds:g} s"
            raise Refused(message, HTTPStatus.GATEWAY_TIMEOUT) from error
        except zmq.ZMQError as error:
            raise Refused(f"receiver {endpoint} cannot be reached: {error}", HTTPStatus.BAD_GATEWAY) from error
        finally:
            socket.close(linger=linger)
