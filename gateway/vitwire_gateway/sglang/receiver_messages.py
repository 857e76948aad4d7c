"""Messages to SGLang's receivers over ZMQ.

The first frame is a pickled `EmbeddingData` of SGLang 0.5.23, written without SGLang or torch, which the receivers
unpickle with an allow-list of classes; the second has the embeddings. Nothing is unpickled here.
"""

import asyncio
import ipaddress
import pickle
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq
import zmq.asyncio

from vitwire import Model, Report
from vitwire.items import Modality
from vitwire.shared.fairness.places import Places
from vitwire_gateway.callers import Caller
from vitwire_gateway.images.image_hosts import Network
from vitwire_gateway.sglang.receiver_requests import Part, refused

Frame = bytes | npt.NDArray[np.uint8]

_POLL_SECONDS = 0.005
_CONNECT_SECONDS = 5.0
_MAX_SENDERS = 128
"""Messages on their way; ZMQ has 1,023 sockets."""
_LINGER_MS = 5000
"""Small messages may still be in ZMQ's buffers when they count as sent."""
_PROTOCOL = 2
_CLASS = ("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData")
_MODALITY = ("sglang.srt.multimodal.modality", "Modality")
_MODALITIES: dict[Modality, int] = {"image": 1, "video": 2}
"""Values of `Modality`."""
_BY_INTERVAL = ("qwen2_5_vl", "qwen2_5_omni", "qwen3_omni_moe")
"""Models whose positions follow from the seconds between groups of frames; others have the seconds in the prompt."""
_USUAL_INTERVAL = 1.0
"""Interval that these models assume, for clips from servers that do not report one."""


class Pusher:
    """Sends each message on a new connection; a receiver that takes too long fails only its message.

    Each caller gets its share of the connections' time.

    networks: receivers must be in one of them, by address; empty for any receiver.
    """

    def __init__(self, seconds: float, networks: Sequence[Network] = ()) -> None:
        self._seconds = seconds
        self._networks = tuple(networks)
        self._context = zmq.asyncio.Context()
        self._places = Places(_MAX_SENDERS)

    async def push_all(self, endpoints: Sequence[str], frames: Sequence[Frame], caller: Caller) -> None:
        """Send to every receiver, once there is a place. Raises ApiError if one did not take the message."""
        sending = (self._push_in_place(each, frames, caller) for each in endpoints)
        outcomes = await asyncio.gather(*sending, return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def check(self, endpoint: str) -> None:
        """Raises ApiError for a receiver that is not in the networks."""
        if not self._networks:
            return
        host, _ = _host_and_port(endpoint)
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            raise refused(f"receiver {host}: expected an IP address, as receivers are limited to networks") from None
        if not any(address.version == each.version and address in each for each in self._networks):
            raise refused(f"receiver {host} is not in a network that embeddings may be sent to")

    def close(self) -> None:
        """Drop the connections, at once."""
        self._context.destroy(linger=0)

    async def _push_in_place(self, endpoint: str, frames: Sequence[Frame], caller: Caller) -> None:
        async with self._places.place(caller.path):
            await self._push(endpoint, frames)

    async def _push(self, endpoint: str, frames: Sequence[Frame]) -> None:
        self.check(endpoint)
        try:
            sender = self._context.socket(zmq.PUSH)
        except zmq.ZMQError as error:
            raise refused(f"too many receivers at a time: {error}", 503) from error
        linger = 0
        try:
            sender.setsockopt(zmq.SNDHWM, 0)
            sender.setsockopt(zmq.IMMEDIATE, 1)  # wait for the connection instead of queueing for it
            async with asyncio.timeout(self._seconds):
                await self._connect(sender, endpoint)
                tracker = await sender.send_multipart(frames, copy=False, track=True)
                while tracker is not None and not tracker.done:  # noqa: ASYNC110  # set by ZMQ's thread
                    await asyncio.sleep(_POLL_SECONDS)
            linger = _LINGER_MS
        except TimeoutError as error:
            message = f"receiver {endpoint} did not take the embedding within {self._seconds:g} s"
            raise refused(message, 504) from error
        except (zmq.ZMQError, OSError, UnicodeError) as error:
            raise refused(f"receiver {endpoint} cannot be reached: {error}", 502) from error
        finally:
            sender.close(linger=linger)

    async def _connect(self, sender: zmq.asyncio.Socket, endpoint: str) -> None:
        """Connect, which a receiver that waits for embeddings lets do at once. Raises ApiError, or as `_resolved`."""
        seconds = min(_CONNECT_SECONDS, self._seconds)
        try:
            async with asyncio.timeout(seconds):
                address = await _resolved(endpoint)
                sender.setsockopt(zmq.IPV6, "[" in address)
                sender.connect(address)
                await sender.poll(None, zmq.POLLOUT)  # type: ignore[call-arg]  # its stub has no parameters
        except TimeoutError as error:
            message = f"receiver {endpoint} did not take the embedding within {seconds:g} s: no connection"
            raise refused(message, 504) from error


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


async def _resolved(endpoint: str) -> str:
    """The endpoint by address. ZMQ would look a name up in the thread that sends for all. Raises OSError."""
    host, port = _host_and_port(endpoint)
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return endpoint
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, address = min(found, key=lambda each: each[0] == socket.AF_INET6)
    return f"tcp://[{address[0]}]:{port}" if family == socket.AF_INET6 else f"tcp://{address[0]}:{port}"


def times_of(model: Model, clips: Sequence[Report]) -> dict[str, object]:
    """The attribute with the times of clips, by the report on each; SGLang fails if it gets both."""
    if model.model_type.startswith(_BY_INTERVAL):
        return {"second_per_grid_ts": [each.second_per_grid or _USUAL_INTERVAL for each in clips]}
    return {"video_timestamps": [model.group_seconds(each.frame_seconds) for each in clips]}


def embedding_header(
    part: Part,
    grids: Sequence[tuple[int, int, int]],
    shape: Sequence[int],
    dtype: str,
    times: Mapping[str, object] = MappingProxyType({}),
) -> bytes:
    """The header of embeddings of `shape` and `dtype` (float32, float16 or bfloat16), of items with these grids.

    times: of `times_of`, for clips.
    """
    plain = _plain(part) | {"grid_dim": [list(grid) for grid in grids], "shape": list(shape), "error_msg": None}
    return _pickled(plain | {"error_code": None, **times}, part.modality, _global("torch", dtype))


def error_header(part: Part, message: str, status: int) -> bytes:
    """The header, and only frame, of a message that fails the request in SGLang."""
    plain = _plain(part) | {"grid_dim": None, "shape": None, "error_msg": message, "error_code": int(status)}
    return _pickled(plain, part.modality, pickle.NONE)


def _plain(part: Part) -> dict[str, Any]:
    identity = {"req_id": part.req_id, "num_parts": part.num_parts, "part_idx": part.part_idx}
    return identity | {"embedding": None, "send_time": None, "_mr_ptr": None}


def _pickled(plain: Mapping[str, Any], modality: Modality, dtype: bytes) -> bytes:
    """An object of `_CLASS` with the attributes `plain`, `dtype` and `modality`."""
    member = _global(*_MODALITY) + _fragment(_MODALITIES[modality]) + pickle.TUPLE1 + pickle.REDUCE
    attributes = {key: _fragment(value) for key, value in plain.items()} | {"dtype": dtype, "modality": member}
    state = b"".join(_fragment(key) + value for key, value in attributes.items())
    return (
        pickle.PROTO + bytes([_PROTOCOL])
        + _global(*_CLASS) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
        + pickle.EMPTY_DICT + pickle.MARK + state + pickle.SETITEMS
        + pickle.BUILD + pickle.STOP
    )  # fmt: skip


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _fragment(value: object) -> bytes:
    """The opcodes that push a plain value: its pickle without the protocol in front and STOP at the end."""
    return pickle.dumps(value, _PROTOCOL)[2:-1]
