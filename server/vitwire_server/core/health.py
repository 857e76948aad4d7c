"""The states of a server, and which of them count as ready and as alive."""

from enum import Enum


class State(Enum):
    STARTING = "starting"
    """Listening; weights are being loaded."""
    WARMING = "warming"
    """Weights are loaded; graphs are being captured and timed."""
    SERVING = "serving"
    DRAINING = "draining"
    """Shutting down: still serving for the lame-duck time, then only requests in flight."""
    FAILED = "failed"
    """The engine ended, hangs or cannot encode. The server may recover from a hang."""


_NEXT = {
    State.STARTING: {State.WARMING, State.DRAINING, State.FAILED},
    State.WARMING: {State.SERVING, State.DRAINING, State.FAILED},
    State.SERVING: {State.DRAINING, State.FAILED},
    State.DRAINING: {State.FAILED},
    State.FAILED: {State.SERVING},
}


class Health:
    """The state of one server. Written on the event loop only; any thread may read."""

    def __init__(self) -> None:
        self.state = State.STARTING
        self.reason = ""
        """Why the state is FAILED; empty in other states."""

    @property
    def is_ready(self) -> bool:
        """Whether to send new requests to this server."""
        return self.state is State.SERVING

    @property
    def is_alive(self) -> bool:
        """Whether the process works; if not, an orchestrator may restart it."""
        return self.state is not State.FAILED

    def follow(self, state: State, reason: str) -> None:
        """Take over the state of another process, which checked the change."""
        self.state, self.reason = state, reason

    def change(self, state: State, reason: str = "") -> None:
        """Change to `state`, unless it is the current one. Raises ValueError if the current state does not allow it."""
        if state is self.state:
            return
        if state not in _NEXT[self.state]:
            raise ValueError(f"the state cannot change from {self.state.value} to {state.value}")
        self.state = state
        self.reason = reason if state is State.FAILED else ""
