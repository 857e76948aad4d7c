"""Environment variables of a command that set nothing.

They are misspelt, or injected by Kubernetes for a Service: one named vitwire sets VITWIRE_PORT=tcp://….
"""

import os
import re
from collections.abc import Collection
from difflib import get_close_matches

_INJECTED = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_INJECTED_URL = re.compile(r"(tcp|udp|sctp)://\S+:\d+")
_CLIENT = {"VITWIRE_TARGET", "VITWIRE_TOKEN"}
"""Read by the `vitwire` command, which may share its environment with a server."""


def is_injected(name: str) -> bool:
    """Whether Kubernetes (or a Docker link) set the variable to announce a Service."""
    value = os.environ.get(name, "")
    return bool(_INJECTED.search(name) or (name.endswith("_PORT") and _INJECTED_URL.fullmatch(value)))


def with_variables(text: str, prefix: str) -> str:
    """The text with the variable behind each flag whose variable is set: `--mode (VITWIRE_ROUTER_MODE)`."""

    def named(flag: re.Match[str]) -> str:
        variable = f"{prefix}{flag[1].replace('-', '_').upper()}"
        is_set = prefix and os.environ.get(variable) and not is_injected(variable)
        return f"{flag[0]} ({variable})" if is_set else flag[0]

    return re.sub(r"--([a-z][a-z-]+)", named, text)


def ignored_variables(prefix: str, names: Collection[str]) -> list[str]:
    """A warning for each variable without effect: unknown, or injected and named like one of these settings.

    Raises as `unknown_variables`.
    """
    injected = [
        f"{variable}={os.environ[variable]} is ignored: Kubernetes set it for a Service of that name; "
        "set enableServiceLinks: false in the pod's spec to avoid this"
        for variable in sorted(f"{prefix}{name.upper()}" for name in names)
        if is_injected(variable)
    ]
    return injected + [f"ignored: {each}" for each in unknown_variables(prefix, names)]


def unknown_variables(prefix: str, names: Collection[str]) -> list[str]:
    """A message for each variable that is not a setting, with the setting probably meant.

    Raises ValueError for one such as VITWIRE_NO_METRICS: only flags have a negative form.
    """
    unknown = []
    for variable, value in sorted(os.environ.items()):
        name = variable.removeprefix(prefix).lower()
        others = variable in _CLIENT or (prefix == "VITWIRE_" and variable.startswith("VITWIRE_ROUTER_"))  # of a child
        if not value or not variable.startswith(prefix) or others or name in names:
            continue
        if name.startswith("no_") and (positive := name.removeprefix("no_")) in names:
            raise ValueError(f"{variable}: unknown variable; set {prefix}{positive.upper()}=off instead")
        if not is_injected(variable):
            close = get_close_matches(name, names, n=1, cutoff=0.7)
            meant = f"; did you mean {prefix}{close[0].upper()}?" if close else ""
            unknown.append(f"{variable} is not a setting{meant}")
    return unknown
