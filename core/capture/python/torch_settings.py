"""Settings of torch that the caller of a step made: autocast, default dtype and device, flags, modes.

A captured step keeps the settings of its capture. Autocast around ``pipe.step(batch)`` is local to the caller's thread,
and export records only autocasts that begin within a step; so it is suspended before the capture, and resumed in the
captured function. The default dtype, the default device and the attention kernels are read again before each step; if
one changes, the step is captured again.
"""

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from attrs import frozen
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ...errors import warn_caller

_KINDS = ("cpu", "cuda")
"""Types of devices that steps compute on."""


@frozen
class Autocasts:
    """The autocasts around a call.

    Args:
        entered: for each type of device with an active autocast: the type, the dtype, whether casts are cached.
    """

    entered: tuple[tuple[str, torch.dtype, bool], ...] = ()

    @classmethod
    def now(cls) -> "Autocasts":
        """The autocasts that are active now."""
        cached = torch.is_autocast_cache_enabled()
        return cls(tuple((k, torch.get_autocast_dtype(k), cached) for k in _KINDS if torch.is_autocast_enabled(k)))

    def suspended(self) -> AbstractContextManager[None]:
        """A context without them."""
        return self._set(False)

    def resumed(self) -> AbstractContextManager[None]:
        """A context with all of them."""
        return self._set(True)

    @contextmanager
    def _set(self, enabled: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype, cached in self.entered:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cached))
            yield


def torch_settings() -> tuple[Hashable, ...]:
    """The current settings, in the order of `SETTINGS`; without those that operators read when they run."""
    c: Any = torch._C
    plain = not c._len_torch_function_stack() and not c._len_torch_dispatch_stack()
    return (
        torch.get_default_dtype(),
        "cpu" if plain else str(torch.get_default_device()),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
        (c._get_flash_sdp_enabled(), c._get_mem_efficient_sdp_enabled(), c._get_math_sdp_enabled()),
        torch.get_deterministic_debug_mode(),
        (c._get_cudnn_enabled(), c._get_cudnn_benchmark(), c._get_cudnn_deterministic(), c._get_mkldnn_enabled()),
        torch.get_float32_matmul_precision(),
        () if plain else tuple(map(id, _modes())),
    )


SETTINGS = (
    "torch.get_default_dtype()", "torch.get_default_device()", "torch.autocast on the CPU", "torch.autocast on the GPU",
    "the cache of torch.autocast", "the kernels of torch.nn.attention", "torch's deterministic algorithms",
    "the flags of torch.backends", "torch.get_float32_matmul_precision()", "the modes around the call",
)  # fmt: skip
"""The names of the settings."""


def _modes() -> list[Any]:
    """The modes of torch that the caller entered, other than the default device, which is compared by name."""
    entered = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return [mode for mode in entered if not isinstance(mode, DeviceContext)]


@contextmanager
def with_gradients() -> Iterator[None]:
    """A context with gradients enabled, because a pipeline may be built under ``torch.no_grad()``."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def without_anomaly_mode(warns: bool = False) -> Iterator[None]:
    """A context without ``torch.autograd.detect_anomaly``: its checks need values, which fake tensors do not have.

    Args:
        warns: whether to warn if the mode is on.
    """
    if warns and torch.is_anomaly_enabled():
        warn_caller(
            "torch.autograd's anomaly mode sees nothing of a captured step: Update(on_nonfinite='raise') gives the "
            "microbatch and the stage of a loss that is not finite",
        )
    with torch.autograd.set_detect_anomaly(False):
        yield
