"""How packages of an extra are installed, for messages about one that is missing."""


def remedy(extra: str) -> str:
    """The command. Nothing is published yet, so it runs in a checkout."""
    return f"in a checkout of Vitwire: pip install '.[{extra}]'"
