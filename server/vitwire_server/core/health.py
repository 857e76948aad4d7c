"""The states of a server, and which of them probes call ready and alive."""

from enum import Enum


class State(Enum):
    """What a server does right now."""

    STARTING = "starting"
    """Listening; the model is being read."""
    WARMING = "warming"
    """The model is there; graphs are captured and timed, forwards tried."""
    SERVING = "serving"
    DRAINING = "draining"
    """Told to stop: first a lame duck that still serves, then only what is in flight goes on."""
    FAILED = "failed"
    """The engine ended, hangs, or cannot encode. A hang may end; until then nobody should come."""


_NEXT = {
    State.STARTING: {State.WARMING, State.DRAINING, State.FAILED},
    State.WARMING: {State.SERVING, State.DRAINING, State.FAILED},
    State.SERVING: {State.DRAINING, State.FAILED},
    State.DRAINING: {State.FAILED},
    State.FAILED: {State.SERVING},
}


class Health:
    """The state of one server. Used on the event loop only; others may read."""

    def __init__(self) -> None:
        self._state = State.STARTING
        self.reason = ""
        """Why it failed; empty in every other state."""

    @property
    def state(self) -> State:
        """What the server does."""
        return self._state

    @property
    def is_ready(self) -> bool:
        """Whether new requests should come here."""
        return self._state is State.SERVING

    @property
    def is_alive(self) -> bool:
        """Whether waiting will help; if not, only a new process will."""
        return self._state is not State.FAILED

    def become(self, state: State, reason: str = "") -> None:
        """Change to `state`; to the state it is in already does nothing. Raises ValueError where that cannot be."""
        if state is self._state:
            return
        if state not in _NEXT[self._state]:
            raise ValueError(f"a server that is {self._state.value} cannot become {state.value}")
        self._state = state
        self.reason = reason if state is State.FAILED else ""
