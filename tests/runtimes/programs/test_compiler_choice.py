"""How Inductor is called: its files, its threads, and what its functions check."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.programs.compiler_choice import CompilerChoice
from torch import fx
from torch._inductor import compile_fx


def test_locale_in_which_inductor_cannot_read_its_files_is_refused_in_one_line(monkeypatch):
    def read(*_, **_options):
        b"\xe2".decode("ascii")

    monkeypatch.setattr(compile_fx, "compile_fx", read)
    with pytest.raises(RequestError, match=r"needs UTF-8 as the encoding of files and this locale has ascii"):
        CompilerChoice.of("inductor").compile(fx.GraphModule({}, fx.Graph()), [])


def test_inductor_function_checks_the_strides_of_its_inputs():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    total = graph.call_function(torch.ops.aten.add.Tensor, (x, y))
    graph.output((total, graph.call_function(torch.ops.aten.tanh.default, (total,))))
    module = fx.GraphModule({}, graph)
    given = [torch.randn(3, 5, dtype=torch.float64) for _ in "xy"]
    compiled = CompilerChoice.of("inductor").compile(module, list(given))
    with torch.no_grad():
        for found, wanted in zip(compiled(*given), module(*given), strict=True):
            assert found.stride() == wanted.stride()
            assert (found - wanted).abs().max() < 1e-12
        with pytest.raises(AssertionError):
            compiled(given[0].t().contiguous().t(), given[1])
