"""Installation commands for extras, for messages about missing packages."""


def remedy(extra: str) -> str:
    """The command. Nothing is published yet, so it runs in a checkout."""
    return f"in a checkout of Vitwire: pip install '.[{extra}]'"
