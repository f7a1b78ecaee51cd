"""The backend of ``torch.compile`` that compiles stages, and how Inductor is called."""

from collections.abc import Callable
from typing import Any

from attrs import frozen
from torch import Tensor, fx

from ...core.errors import RequestError

Compile = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]
"""A backend of ``torch.compile``: takes a graph and example inputs, and returns a function of such inputs."""

INDUCTOR = "inductor"
_OURS = "panpipe"


@frozen
class CompilerChoice:
    """The user's choice of a backend.

    Args:
        name: of the backend, for messages.
    """

    name: str
    compile: Compile

    @classmethod
    def of(cls, wanted: "str | Compile | None") -> "CompilerChoice | None":
        """The choice for the user's ``compile=``.

        Raises:
            RequestError: it names no backend of ``torch.compile``, or is neither a name nor a function.
        """
        if wanted is None:
            return None
        if callable(wanted):
            return cls(getattr(wanted, "__name__", type(wanted).__name__), wanted)
        from torch._dynamo.backends.registry import list_backends, lookup_backend

        known = sorted(set(list_backends(exclude_tags=())) - {_OURS})
        if not isinstance(wanted, str) or wanted not in known:
            usual = ", ".join(name for name in sorted(list_backends()) if name != _OURS)
            raise RequestError(
                f"compile is {wanted!r}: it names a backend of torch.compile, or is a function of a graph and example "
                f"inputs; known are {usual}"
            )
        return cls(wanted, _inductor(1) if wanted == INDUCTOR else lookup_backend(wanted))

    def check(self, device_type: str) -> None:
        """Refuse Inductor if a program that it needs is missing.

        Args:
            device_type: of the devices that stages are compiled for.

        Raises:
            RequestError: there is no C++ compiler, or for GPUs no Triton.
        """
        if self.name != INDUCTOR:
            return
        if device_type == "cuda":
            from torch.utils._triton import has_triton

            if not has_triton():
                raise RequestError(
                    "compile='inductor' needs Triton for GPUs and PyTorch finds none that works here: pip install "
                    "triton, or leave compile out"
                )
            return
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:
            raise RequestError(
                "compile='inductor' needs a C++ compiler and none is found here: install g++, name another one in the "
                "environment variable CXX, or leave compile out"
            ) from error

    def with_threads(self, threads: int) -> "CompilerChoice":
        """The same choice, for programs that run on this many threads each."""
        return CompilerChoice(self.name, _inductor(threads)) if self.name == INDUCTOR else self


def _inductor(threads: int) -> Compile:
    def compile_graph(graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        from torch._inductor import compile_fx as inductor

        from .in_place_products import InPlaceProducts

        # Loops are split for the threads of a stage. No compile pool: its processes would outlive a killed rank.
        options = {
            "cpp.threads": threads, "compile_threads": 1, "post_grad_custom_post_pass": InPlaceProducts(),
        }  # fmt: skip
        inner: list[Callable[..., Any]] = []

        def recording(*args: Any, **kwargs: Any) -> Any:
            inner.append(inductor.compile_fx_inner(*args, **kwargs))
            return inner[-1]

        try:
            found: Any = inductor.compile_fx(graph, examples, inner_compile=recording, config_patches=options)
        except UnicodeDecodeError as error:  # Inductor reads its own templates in the locale's encoding
            raise RequestError(
                f"compile='inductor' needs UTF-8 as the encoding of files and this locale has {error.encoding}: set "
                "PYTHONUTF8=1 or LC_ALL=C.UTF-8, or leave compile out"
            ) from error
        if len(inner) == 1:
            # The function below AOTAutograd's, which takes its inputs in a list and frees each after its last use. What
            # it returns, and adds to sums, is compared with the graph's before it is used.
            return Boxed(inner[0])
        return found  # type: ignore[no-any-return]

    return compile_graph


@frozen
class Boxed:
    """A function that takes its inputs in a list, which it empties.

    Args:
        function: that function.
    """

    function: Callable[[list[Any]], Any]

    def __call__(self, *inputs: Any) -> Any:
        return self.function(list(inputs))
