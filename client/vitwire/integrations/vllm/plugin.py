"""What vLLM runs at its start, in each of its processes: the entry point `vllm.general_plugins` of this package."""

from importlib.metadata import version

VERSIONS = ("0.33",)
"""Releases of vLLM that the hooks were written for."""
_RENDERER = ("vitwire.integrations.vllm.rendering", "renderer_of")


def register() -> None:
    """Register our renderer, which falls back to vLLM's own if the engine does not use our connector."""
    if version("vllm").startswith(tuple(f"{each}." for each in VERSIONS)):
        from vllm.renderers.registry import RENDERER_REGISTRY  # noqa: PLC0415  # vLLM has begun to load it

        RENDERER_REGISTRY.renderers["hf"] = _RENDERER


def is_registered() -> bool:
    """Whether vLLM's front end is hooked."""
    from vllm.renderers.registry import RENDERER_REGISTRY  # noqa: PLC0415  # as above

    return bool(RENDERER_REGISTRY.renderers.get("hf") == _RENDERER)
