"""The seed and the generator of a random draw, and fused attention with dropout whose numbers come from a key.

The seed is made of the key of the microbatch and the draw's ordinal in the whole graph. The generator is a new one for
each draw; in a captured graph it is one that is seeded before each replay. A CUDA graph repeats the kernels that were
captured, and the numbers that they read from the host. So a draw in a graph has a generator of its own, which is
registered with the graph before the capture: the graph then reads seed and offset from memory that each replay fills.
A draw has the same numbers as outside of a graph: there, too, its generator starts at its seed.

The fused kernels of attention draw the dropout mask while they run, from the generator of their device, and return
where they drew: seed and offset, from which the backward draws the same mask again. So no tensor of the size of the
scores is kept. A keyed operator here sets that generator from the key, calls the kernel, and sets the generator back.
In a stage's joint graph it replaces the kernel of the forward; the backward is torch's, which reads the seed and the
offset as saved tensors.

The mask of a kernel differs from that of ``native_dropout``, and between kernels. Equal means: the same key gives the
same mask under every plan, also in a recomputation, and in eager PyTorch under `KeyedRandom` on the same kind of GPU
with the same kernel. No kernel of a CPU has dropout (torch 2.13): there attention with dropout is computed in parts.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from .nodes import arguments_by_name


def seed_of(key: Tensor, ordinal: int) -> int:
    """The seed of one draw.

    Args:
        key: of the microbatch, see `randomness.random_key`.
        ordinal: of the draw in the whole graph.
    """
    text = ",".join(str(part) for part in (*key.tolist(), ordinal))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


_captured = threading.local()


class GraphGenerators:
    """The generators of the draws of one captured graph.

    Args:
        device: of the draws.
        ordinals: of the draws in the whole graph of the step.

    Attributes:
        all: the generators.
    """

    def __init__(self, device: torch.device, ordinals: Iterable[int]) -> None:
        self._by_ordinal = {ordinal: torch.Generator(device) for ordinal in ordinals}
        self.all = list(self._by_ordinal.values())

    def seed(self, key: Tensor) -> None:
        """Set every generator to the seed of its draw.

        Args:
            key: of the microbatch, on the host.
        """
        for ordinal, generator in self._by_ordinal.items():
            generator.manual_seed(seed_of(key, ordinal))

    def of(self, ordinal: int) -> torch.Generator:
        """The generator of a draw.

        Raises:
            RuntimeError: the graph was captured without it.
        """
        found = self._by_ordinal.get(ordinal)
        if found is None:
            raise RuntimeError(f"draw {ordinal} has no generator in this graph: it has those of {[*self._by_ordinal]}")
        return found

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which this thread's draws use these generators."""
        before, _captured.generators = getattr(_captured, "generators", None), self
        try:
            yield
        finally:
            _captured.generators = before


def graph_generators() -> GraphGenerators | None:
    """The generators of the graph that this thread captures; None outside of a capture."""
    return getattr(_captured, "generators", None)


def generator_of(key: Tensor, ordinal: int, device: torch.device) -> torch.Generator:
    """The generator of a draw, at its seed.

    Args:
        key: of the microbatch; not read in a capture.
        ordinal: of the draw in the whole graph.
        device: of the draw.
    """
    captured = graph_generators()
    if captured is not None:
        return captured.of(ordinal)
    return torch.Generator(device).manual_seed(seed_of(key, ordinal))


aten = torch.ops.aten

_library = torch.library.Library("panpipe", "FRAGMENT")
_GENERATORS = threading.Lock()
"""Held while a device's generator is set: threads share it."""

Keyed = Callable[..., Any]


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operators of a device draw from, if they are given none."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


@contextmanager
def _seeded(device: torch.device, key: Tensor, ordinal: int) -> Iterator[None]:
    """A context in which the device's generator starts at the seed of a draw; afterwards it is as before.

    In a capture it shares the state of the draw's generator in the graph meanwhile: a seed cannot be set there.
    """
    generator, captured = default_generator(device), graph_generators()
    with _GENERATORS:
        if captured is not None:
            shared = generator.graphsafe_get_state()
            generator.graphsafe_set_state(captured.of(ordinal))
            try:
                yield
            finally:
                generator.graphsafe_set_state(shared)
            return
        before = generator.get_state()
        generator.manual_seed(seed_of(key, ordinal))
        try:
            yield
        finally:
            generator.set_state(before)


def _define(name: str, arguments: str, returned: tuple[int, ...]) -> tuple[Any, Keyed]:
    """Define ``panpipe::<name>``, which calls the kernel of that name with its generator set.

    Args:
        name: of torch's operator.
        arguments: its arguments, as in its schema.
        returned: positions of the results that the keyed operator returns: those that the backward reads.

    Returns:
        Torch's operator, and the keyed one.
    """
    kernel = getattr(aten, name).default
    results = ", ".join(["Tensor"] * len(returned))
    _library.define(f"{name}({arguments}, float? scale, Tensor random_key, int ordinal) -> ({results})")

    def picked(values: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return tuple(values[i] for i in returned)

    def real(query: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *values, scale, key, ordinal = rest
        with _seeded(query.device, key, ordinal):
            return picked(kernel(query, *values, scale=scale))

    def fake(query: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *values, scale, _key, _ordinal = rest
        return picked(kernel(query, *values, scale=scale))

    _library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"panpipe::{name}", fake, lib=_library)
    return kernel, getattr(torch.ops.panpipe, name).default


_QKV = "Tensor query, Tensor key, Tensor value"
_FLASH, _flash = _define(
    "_scaled_dot_product_flash_attention",
    f"{_QKV}, float dropout_p, bool is_causal, bool return_debug_mask",
    (0, 1, 6, 7),
)
_EFFICIENT, _efficient = _define(
    "_scaled_dot_product_efficient_attention",
    f"{_QKV}, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p, bool is_causal",
    (0, 1, 2, 3),
)
_CUDNN, _cudnn = _define(
    "_scaled_dot_product_cudnn_attention",
    f"{_QKV}, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p, bool is_causal, bool return_debug_mask",
    (0, 1, 6, 7),
)

KEYED = frozenset({_flash, _efficient, _cudnn})
"""The keyed operators."""
BACKWARDS = frozenset(
    {
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
    }
)
"""Backwards that torch marks as random, and that read the seed and the offset of their forward."""

Rule = Callable[..., Any]


def _rule(kernel: Any, keyed: Keyed, lengths: bool) -> Rule:
    def rule(mode: Any, *args: Any, **kwargs: Any) -> Any:
        given = arguments_by_name(kernel, args, kwargs)
        if not given["dropout_p"]:
            return kernel(*args, **kwargs)
        values = [given[argument.name] for argument in kernel._schema.arguments if argument.name != "scale"]
        found = keyed(*values, given["scale"], *mode._next())
        if not lengths:
            return found
        # Torch's operator also returns cumulative lengths, which only nested tensors have, and a mask for debugging.
        result, logsumexp, seed, offset = found
        return (result, logsumexp, None, None, given["query"].shape[2], given["key"].shape[2], seed, offset, None)

    return rule


RULES: dict[Any, Rule] = {
    _FLASH: _rule(_FLASH, _flash, lengths=True),
    _EFFICIENT: _rule(_EFFICIENT, _efficient, lengths=False),
    _CUDNN: _rule(_CUDNN, _cudnn, lengths=True),
}
"""Fused attention → the function that `KeyedRandom` calls in its place."""
