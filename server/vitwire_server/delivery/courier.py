"""The courier: delivers rows in a separate thread, so that neither the engine's thread nor an event loop waits."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread

from vitwire.shared.agents import AgentError, Memory
from vitwire_server.core.delivery import Delivered, DeviceRows, Fallback, MemoryKind, NotDelivered, Placing, Rows
from vitwire_server.delivery import cuda
from vitwire_server.delivery.messages import Outbox
from vitwire_server.delivery.transfers import Bounds, Job, Transfers
from vitwire_server.observe.metrics.sessions import DeliveryMetrics

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 10.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 2e-3
"""While rows are waited for, which do not say when they are ready."""
_IDLE_PAUSE = 0.1
"""While something may take too long."""
_RATED_BYTES, _RATED = 4 << 20, 16
"""Size from which embeddings say how fast they are written, and how many of them do."""
_SLOW = 1e9
"""Bytes a second that CUDA IPC and RDMA exceed many times; below, memory probably goes over emulated TCP."""
Done = Callable[[Delivered | NotDelivered], None]
Upload = Callable[[memoryview], DeviceRows | None]


class Courier:
    """Writes rows into consumers' memory. `deliver` may be called by any thread."""

    def __init__(
        self,
        metrics: DeliveryMetrics,
        bounds: Bounds = Bounds(),  # noqa: B008 - immutable
    ) -> None:
        """Start the processes that deliver. Raises AgentError."""
        self._metrics = metrics
        self._bounds = bounds
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._transfers = Transfers(bounds, self._answer)
        self._done: dict[Job, Done] = {}
        """Callbacks of deliveries without an outcome; changed under the lock, like `_closed`."""
        self._closed = False
        self._upload: Upload | None = None
        self._rates: list[float] = []
        """Bytes a second of the first large deliveries from device memory."""
        self._lock = Lock()
        started: Future[None] = Future()
        self._thread = Thread(target=self._run, args=(started,), name="delivery", daemon=True)
        self._thread.start()
        started.result()

    def deliver(self, placing: Placing, rows: Rows, done: Done) -> None:
        """Write rows to their place, which was checked. `done` is called in the delivery thread or in this call.

        Takes over `rows`: they are released once nothing reads them any more, before or after `done` is called.
        """
        job = Job(placing, rows, time.monotonic())
        with self._lock:
            is_full = len(self._done) >= self._bounds.deliveries
            refusal = Fallback.OFF if self._closed else Fallback.BUSY if is_full else None
            if refusal is None:
                self._done[job] = done
        if refusal is None:
            self._send(lambda: self._transfers.accept(job))
        else:
            rows.release()
            self.refuse(refusal, done)

    def refuse(self, reason: Fallback, done: Done) -> None:
        """Answer that rows are not delivered."""
        self._metrics.fell_back(reason)
        done(NotDelivered(reason))

    def add_device(self, memory: Memory, outbox: Outbox, upload: Upload) -> None:
        """Deliver from device memory as well. `upload` copies rows from the host into it.

        Raises AgentError or CudaError.
        """
        added: Future[None] = Future()

        def add() -> None:
            try:
                cuda.make_current(outbox.device)  # this thread asks whether rows on the device are ready
                self._transfers.add_device(memory, outbox)
            except Exception as error:  # noqa: BLE001 - the caller's, who waits for it
                added.set_exception(error)
            else:
                added.set_result(None)

        with self._lock:  # what is sent before the end is handled
            if self._closed:
                raise AgentError("NIXL delivery is off")
            self._send(add)
        added.result()
        self._upload = upload

    def upload(self, data: memoryview) -> DeviceRows | Fallback:
        """Rows of the host on the device; or why not: without a device OFF, without room on it BUSY."""
        if self._upload is None:
            return Fallback.OFF
        rows = self._upload(data)
        if rows is None:
            return Fallback.BUSY
        self._metrics.uploaded(rows.nbytes)
        return rows

    def close(self) -> None:
        """End all deliveries and disconnect from all agents."""
        with self._lock:
            self._closed = True
        self._send(lambda: None)
        self._thread.join(_CLOSE_SECONDS)

    def _send(self, call: Callable[[], None]) -> None:
        self._inbox.put(call)
        self._transfers.senders.wake()

    def _run(self, started: "Future[None]") -> None:
        try:
            self._transfers.senders.start()
        except AgentError as error:
            self._transfers.close()
            started.set_exception(error)
            return
        started.set_result(None)
        pause = _SHORTEST_PAUSE
        try:
            while not self._closed:
                timeout = pause if self._transfers.waiting else _IDLE_PAUSE
                heard = list(self._transfers.senders.wait(timeout))
                for sender, messages in heard:
                    self._transfers.receive(sender, messages)
                self._handle_inbox()
                moved = self._transfers.advance() or bool(heard)
                self._metrics.agents.set(len(self._transfers.peers))
                pause = _SHORTEST_PAUSE if moved else min(2 * pause, _LONGEST_PAUSE)
        except Exception:  # noqa: BLE001 - the thread's loop: rows then go out in responses
            _log.exception("NIXL delivery is off from now on")
        self._end()

    def _handle_inbox(self) -> None:
        with suppress(Empty):
            while True:
                self._inbox.get_nowait()()

    def _end(self) -> None:
        """Answer everything that has no outcome."""
        with self._lock:
            self._closed = True
        try:
            self._handle_inbox()
            self._transfers.close()
        except Exception:  # noqa: BLE001 - as above; what follows must happen
            _log.exception("NIXL deliveries cannot be ended")
        self._metrics.agents.set(0)
        with self._lock:
            left, self._done = self._done, {}
        for done in left.values():  # lost to an error, or accepted just before the end; their rows may be in use
            self._metrics.fell_back(Fallback.FAILED)
            done(NotDelivered(Fallback.FAILED))

    def _answer(self, job: Job, failure: Fallback | None) -> None:
        """The outcome of a delivery is known; None if its rows are in place."""
        with self._lock:
            done = self._done.pop(job)
        if failure is None:
            seconds = time.monotonic() - job.started
            self._metrics.delivered(job.rows.nbytes, seconds)
            on_device = job.placing.consumer.memory is MemoryKind.DEVICE and job.copy is None
            if on_device and job.rows.nbytes >= _RATED_BYTES and len(self._rates) < _RATED:
                self._rate(job.rows.nbytes / max(time.monotonic() - job.posted, 1e-9))
            done(Delivered(job.placing.region, seconds))
        else:
            self._metrics.fell_back(failure)
            done(NotDelivered(failure))

    def _rate(self, rate: float) -> None:
        """Say once how fast the fastest of them was."""
        self._rates.append(rate)
        if len(self._rates) < _RATED:
            return
        fastest = max(self._rates)
        if fastest < _SLOW:
            text = (
                "NIXL writes only %.2f GB/s into clients' devices: CUDA IPC and RDMA are not in use. Containers need "
                "one PID namespace and one /dev/shm (docs/one-gpu.md)"
            )
            _log.warning(text, fastest / 1e9)
        else:
            _log.info("NIXL writes %.1f GB/s into clients' devices", fastest / 1e9)
