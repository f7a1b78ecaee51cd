"""Random numbers that do not depend on the plan.

Every draw has its own generator, keyed by (seed, step, microbatch, ordinal of the draw in the whole graph). So cuts,
schedules and recomputation do not change the numbers, and threads share no generator. `KeyedRandom` implements this.
Stage programs are traced under it, with the key as an input of the program; an eager model that runs under it draws the
same numbers.

A CUDA graph repeats the kernels that were captured, and the numbers that they read from the host. So a draw in a graph
has a generator of its own, which is registered with the graph before the capture: the graph then reads seed and offset
from memory that each replay fills. A draw has the same numbers as outside of a graph: there, too, its generator starts
at its seed.

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
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import RequestError
from ..values.user_lines import current_line
from .nodes import arguments_by_name

aten = torch.ops.aten

_library = torch.library.Library("panpipe", "DEF")


def seed_of(key: Tensor, ordinal: int) -> int:
    """The seed of one draw.

    Args:
        key: of the microbatch, see `random_key`.
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


_GENERATORS = threading.Lock()
"""Held while a device's generator is set: threads share it."""

Keyed = Callable[..., Any]


@contextmanager
def _seeded(device: torch.device, key: Tensor, ordinal: int) -> Iterator[None]:
    """A context in which the device's generator starts at the seed of a draw; afterwards it is as before.

    In a capture it shares the state of the draw's generator in the graph meanwhile: a seed cannot be set there.
    """
    if device.type == "cpu":
        generator = torch.default_generator
    else:
        generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    captured = graph_generators()
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


def _define_attention(name: str, arguments: str, returned: tuple[int, ...]) -> tuple[Any, Keyed]:
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
_FLASH, _flash = _define_attention(
    "_scaled_dot_product_flash_attention",
    f"{_QKV}, float dropout_p, bool is_causal, bool return_debug_mask",
    (0, 1, 6, 7),
)
_EFFICIENT, _efficient = _define_attention(
    "_scaled_dot_product_efficient_attention",
    f"{_QKV}, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p, bool is_causal",
    (0, 1, 2, 3),
)
_CUDNN, _cudnn = _define_attention(
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


def _attention_rule(kernel: Any, keyed: Keyed, lengths: bool) -> Callable[..., Any]:
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


RULES: dict[Any, Callable[..., Any]] = {
    _FLASH: _attention_rule(_FLASH, _flash, lengths=True),
    _EFFICIENT: _attention_rule(_EFFICIENT, _efficient, lengths=False),
    _CUDNN: _attention_rule(_CUDNN, _cudnn, lengths=True),
}
"""Fused attention → the function that `KeyedRandom` calls in its place."""


DRAWS_AT: dict[Any, Any] = {}
"""Keyed draw → the same draw with its ordinal in a tensor, for compiled functions that several draws share."""


def random_key(seed: int, step: int, microbatch: int) -> Tensor:
    """The key of one microbatch: an int64 tensor of shape (3,) on the CPU."""
    return torch.tensor([seed, step, microbatch], dtype=torch.int64)


def _define(name: str, arguments: str, draw: Callable[..., Any]) -> Callable[..., Tensor]:
    """Define ``panpipe::name(Tensor like, <arguments>, Tensor key, int ordinal)``; the result looks like ``like``.

    ``panpipe::name_at`` is the same with its ordinal in a tensor.
    """
    _library.define(f"{name}(Tensor like, {arguments}, Tensor key, int ordinal) -> Tensor")
    _library.define(f"{name}_at(Tensor like, {arguments}, Tensor key, Tensor ordinal) -> Tensor")

    def real(like: Tensor, *rest: Any) -> Tensor:
        *values, key, ordinal = rest
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
        draw(out, *values, generator=generator_of(key, ordinal, like.device))
        return out

    def meta(like: Tensor, *rest: Any) -> Tensor:
        return torch.empty_like(like, memory_format=torch.contiguous_format)

    def real_at(like: Tensor, *rest: Any) -> Tensor:
        *values, ordinal = rest
        return real(like, *values, int(ordinal))

    for kind, function in ((name, real), (f"{name}_at", real_at)):
        _library.impl(kind, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"panpipe::{kind}", meta, lib=_library)
    overload: Callable[..., Tensor] = getattr(torch.ops.panpipe, name).default
    DRAWS_AT[overload] = getattr(torch.ops.panpipe, f"{name}_at").default
    return overload


def _draw_multinomial(out: Tensor, weights: Tensor, replacement: bool, generator: torch.Generator) -> None:
    out.copy_(torch.multinomial(weights, out.shape[-1], replacement, generator=generator))


def _draw_dirichlet(out: Tensor, concentration: Tensor, generator: torch.Generator) -> None:
    out.copy_(torch._sample_dirichlet(concentration, generator=generator))


def _draw_gamma(out: Tensor, concentration: Tensor, generator: torch.Generator) -> None:
    out.copy_(torch._standard_gamma(concentration, generator=generator))


def _draw_permutation(out: Tensor, count: int, generator: torch.Generator) -> None:
    out.copy_(torch.randperm(count, generator=generator, device=out.device, dtype=out.dtype))


bernoulli = _define("bernoulli", "float p", lambda out, p, generator: out.bernoulli_(p, generator=generator))
bernoulli_each = _define(
    "bernoulli_each", "Tensor p", lambda out, p, generator: out.copy_(torch.bernoulli(p, generator=generator))
)
uniform = _define(
    "uniform", "float low, float high", lambda out, a, b, generator: out.uniform_(a, b, generator=generator)
)
normal = _define("normal", "float mean, float std", lambda out, a, b, generator: out.normal_(a, b, generator=generator))
exponential = _define(
    "exponential", "float rate", lambda out, rate, generator: out.exponential_(rate, generator=generator)
)
integers = _define(
    "integers", "SymInt low, SymInt high", lambda out, a, b, generator: out.random_(a, b, generator=generator)
)
multinomial = _define("multinomial", "Tensor weights, bool replacement", _draw_multinomial)
dirichlet = _define("dirichlet", "Tensor concentration", _draw_dirichlet)
gamma = _define("gamma", "Tensor concentration", _draw_gamma)
permutation = _define("permutation", "SymInt count", _draw_permutation)


def ordinals_of(nodes: Iterable[fx.Node]) -> tuple[int, ...]:
    """The ordinals of the random draws among nodes of a graph, ascending."""
    draws = [node for node in nodes if node.target in DRAWS_AT or node.target in KEYED]
    return tuple(sorted(int(node.args[-1]) for node in draws))  # type: ignore[arg-type]


class KeyedRandom(TorchDispatchMode):
    """A dispatch mode under which every random operator draws from the keyed streams.

    Args:
        key: int64 tensor of shape (3,), see `random_key`.
        first_ordinal: ordinal of the next draw in the whole graph.

    Attributes:
        ordinal: ordinal of the next draw; the difference to ``first_ordinal`` is how many there were.
    """

    def __init__(self, key: Tensor, first_ordinal: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key = key
        self.ordinal = first_ordinal

    def _next(self) -> tuple[Tensor, int]:
        self.ordinal += 1
        return self.key, self.ordinal - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None:
            return rule(self, *args, **{name: value for name, value in kwargs.items() if name != "generator"})
        seeded = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and func not in BACKWARDS
        if seeded and not draws_nothing(func, args, kwargs):
            raise RequestError(
                f"{current_line()}operator {func} draws random numbers in an unsupported way: random numbers must "
                "not depend on the plan; use dropout, rand, randn, randint, bernoulli, normal or multinomial"
            )
        return func(*args, **kwargs)


def draws_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator's dropout is off in this call, as in attention without dropout or in evaluation mode."""
    given = arguments_by_name(func, args, kwargs)
    rates = [given[name] for name in ("dropout_p", "p", "dropout") if name in given]
    return given.get("train") is False or bool(rates and rates[0] == 0)


def _native_dropout(mode: KeyedRandom, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = bernoulli(x, 1 - p, *mode._next())
    if x.device.type == "cpu" and p < 1:  # here eager PyTorch rounds the scale to the tensor's precision
        return x * (mask / (1 - p)), mask.to(torch.bool)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return x * mask * scale, mask.to(torch.bool)


def _new(create: Callable[..., Tensor], draw: Callable[..., Tensor], *values: float) -> Callable[..., Tensor]:
    def rule(mode: KeyedRandom, given: Any, **options: Any) -> Tensor:
        return draw(create(given, **options), *values, *mode._next())

    return rule


def _integers(mode: KeyedRandom, low: int, high: int, size: Any, **options: Any) -> Tensor:
    options.setdefault("dtype", torch.int64)
    return integers(torch.empty(size, **options), low, high, *mode._next())


def _multinomial(mode: KeyedRandom, weights: Tensor, samples: int, replacement: bool = False) -> Tensor:
    like = weights.new_empty((*weights.shape[:-1], samples), dtype=torch.int64)
    return multinomial(like, weights, replacement, *mode._next())


def _permutation(mode: KeyedRandom, count: int, **options: Any) -> Tensor:
    options["dtype"] = options.get("dtype") or torch.int64
    return permutation(torch.empty(count, **options), count, *mode._next())


def _normal(mode: KeyedRandom, mean: Any, deviation: Any) -> Tensor:
    """``torch.normal`` with tensors, or with a tensor and a number."""
    shapes = [part.shape for part in (mean, deviation) if isinstance(part, Tensor)]
    like = (mean if isinstance(mean, Tensor) else deviation).new_empty(torch.broadcast_shapes(*shapes))
    drawn: Tensor = normal(like, 0.0, 1.0, *mode._next()) * deviation + mean
    return drawn


_RULES: dict[Any, Callable[..., Any]] = {
    aten.bernoulli_.float: lambda mode, x, p=0.5: x.copy_(bernoulli(x, p, *mode._next())),
    aten.bernoulli_.Tensor: lambda mode, x, p: x.copy_(bernoulli_each(x, p, *mode._next())),
    aten.bernoulli.default: lambda mode, p: bernoulli_each(p, p, *mode._next()),
    aten.bernoulli.p: lambda mode, x, p: bernoulli(x, p, *mode._next()),
    aten.native_dropout.default: _native_dropout,
    aten.rand.default: _new(torch.empty, uniform, 0.0, 1.0),
    aten.randn.default: _new(torch.empty, normal, 0.0, 1.0),
    aten.rand_like.default: _new(torch.empty_like, uniform, 0.0, 1.0),
    aten.randn_like.default: _new(torch.empty_like, normal, 0.0, 1.0),
    aten.randint.default: lambda mode, high, size, **o: _integers(mode, 0, high, size, **o),
    aten.randint.low: _integers,
    aten.randint_like.default: lambda mode, x, high, **o: integers(torch.empty_like(x, **o), 0, high, *mode._next()),
    aten.randint_like.low_dtype: lambda mode, x, low, high, **o: integers(
        torch.empty_like(x, **o), low, high, *mode._next()
    ),
    aten.randperm.default: _permutation,
    aten.multinomial.default: _multinomial,
    aten._sample_dirichlet.default: lambda mode, x: dirichlet(x, x, *mode._next()),
    aten._standard_gamma.default: lambda mode, x: gamma(x, x, *mode._next()),
    aten.normal.Tensor_Tensor: _normal,
    aten.normal.Tensor_float: lambda mode, mean, deviation=1.0: _normal(mode, mean, deviation),
    aten.normal.float_Tensor: _normal,
    aten.uniform_.default: lambda mode, x, a=0.0, b=1.0: x.copy_(uniform(x, a, b, *mode._next())),
    aten.normal_.default: lambda mode, x, a=0.0, b=1.0: x.copy_(normal(x, a, b, *mode._next())),
    aten.random_.to: lambda mode, x, high: x.copy_(integers(x, 0, high, *mode._next())),
    getattr(aten.random_, "from"): lambda mode, x, low, high: x.copy_(integers(x, low, high, *mode._next())),
    aten.exponential_.default: lambda mode, x, rate=1.0: x.copy_(exponential(x, rate, *mode._next())),
}
_RULES |= {
    getattr(aten, name).generator: _RULES[getattr(aten, name).default]
    for name in ("rand", "randn", "randint", "randperm")
}
_RULES[aten.randint.low_generator] = _integers
_RULES |= RULES
