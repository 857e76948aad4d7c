"""A guard against tensors on the host in a forward: a CUDA graph would refuse to copy them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NoHostTensors(TorchDispatchMode):
    """Fails at the first operation that reads or returns a tensor on the CPU."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        found = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type == "cpu"]
        assert not found, f"{func} reads or returns tensors {found} on the host"
        return result
