"""Settings of torch's around a call that change what a step computes: a captured step keeps those of its capture.

Autocast around ``pipe.step(batch)`` belongs to the caller's thread alone, and export records only what begins within a
step; so it is left, and entered again within what is captured. The default dtype, the default device and the kernels
of attention are read again before each step: where one is another, the step is captured again.
"""

from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import nn

from ...errors import RequestError

_KINDS = ("cpu", "cuda")
"""Types of devices that steps compute on."""


@frozen
class Autocasts:
    """The autocasts around a call.

    Args:
        entered: of each type of device that has one: the type, the dtype, whether casts are cached.
    """

    entered: tuple[tuple[str, torch.dtype, bool], ...] = ()

    @classmethod
    def now(cls) -> "Autocasts":
        """Those that are active."""
        cached = torch.is_autocast_cache_enabled()
        return cls(tuple((k, torch.get_autocast_dtype(k), cached) for k in _KINDS if torch.is_autocast_enabled(k)))

    @contextmanager
    def left(self) -> Iterator[None]:
        """Within, none of them is active."""
        with ExitStack() as stack:
            for kind, dtype, _ in self.entered:
                stack.enter_context(torch.autocast(kind, dtype, enabled=False))
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, all of them are."""
        with ExitStack() as stack:
            for kind, dtype, cached in self.entered:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
            yield


def surroundings() -> dict[str, Hashable]:
    """What a setting is called → its value now. Settings that operators read whenever they run are not among them."""
    cuda: Any = torch.backends.cuda
    return {
        "torch.get_default_dtype()": str(torch.get_default_dtype()),
        "torch.get_default_device()": str(torch.get_default_device()),
        "torch.autocast": Autocasts.now().entered,
        "the kernels of torch.nn.attention": (
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
        ),
    }  # fmt: skip


@contextmanager
def with_gradients() -> Iterator[None]:
    """Within, gradients are on, whatever the caller is in: a pipeline may be built under ``torch.no_grad()``."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def refuse_inference_tensors(model: nn.Module) -> None:
    """Refuse a model that was built where plain PyTorch cannot train it afterwards.

    Raises:
        RequestError: by the name of a parameter.
    """
    found = next((name for name, p in model.named_parameters() if p.requires_grad and p.is_inference()), None)
    if found is not None:
        raise RequestError(
            f"parameter '{found}' was created under torch.inference_mode(), and autograd saves no such tensor: build "
            "the model outside of it"
        )


def refuse_no_grad() -> None:
    """Refuse to train where plain PyTorch has no backward.

    Raises:
        RequestError: gradients are disabled around the call.
    """
    mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
    if not torch.is_grad_enabled():
        raise RequestError(
            f"step(batch) is called under torch.{mode}(), where a loss has no gradient: call it outside of that, or "
            "call evaluate(batch)"
        )
