"""Stages whose groups of operators are compiled train as those whose are not; what is compiled, and by what."""

import copy
import subprocess
import warnings

import panpipe
import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.programs.stage import stage_graph
from panpipe.core.errors import RequestError
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.programs.compiler_choice import CompilerChoice
from panpipe.runtimes.programs.stage_compiler import StageCompiler
from torch import fx, nn

from ...laws.grouped import grouped
from ...support.cuts import even_plan
from ...support.models import CASES
from ...support.parity import PLANS, assert_equal, build, distance, largest
from ...support.programs.evaluation import joined_alone, loss_alone

# Stages whose groups of operators are compiled train as those whose are not, and hold what the partition says.


GPT, CONV = "tied gpt with dropout", "batchnorm with a skip"
F64 = torch.float64


def as_it_is(graph, examples):
    """A backend of torch.compile that compiles nothing."""
    return graph.forward


def compiler_of(backend=as_it_is):
    return StageCompiler(CompilerChoice.of(backend))


@pytest.mark.parametrize(("name", "plan"), [
    *(pytest.param(name, "split backward", marks=[pytest.mark.slow] * (name == "token-weighted")) for name in CASES),
    (GPT, "recompute"),
])  # fmt: skip
def test_compiled_groups_change_no_result(name, plan):
    compiler = compiler_of()
    programs = {"compiler": compiler}
    assert_equal(distance(ThreadTeam(2), name, torch.float64, 8, 4, programs=programs, **PLANS[plan]))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["split backward", "recompute"])
@pytest.mark.parametrize("name", CASES)
def test_inductor_compiles_every_case(name, plan):
    programs = {"compiler": compiler_of("inductor")}
    found = distance(ThreadTeam(2), name, torch.float64, 8, 4, programs=programs, **PLANS[plan])
    assert largest((found["loss"], found["gradient"], found["buffer"])) < 1e-9
    assert found["parameter"] < 1e-7


def logits(model, batch):
    return model(batch["x"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:microbatches of a new shape")
@pytest.mark.parametrize("name", [GPT, CONV])
def test_evaluation_with_inductor_equals_one_without_compilation(name):
    """Losses and rows of forwards alone are those of one process, and no group of theirs is left as it is."""
    case, compiler, tolerance = CASES[name], compiler_of("inductor"), {"rtol": 0, "atol": 1e-9}
    pipe = build(ThreadTeam(2), name, F64, 8, None, 4, compiler=compiler, **PLANS["split backward"])
    alone = copy.deepcopy(pipe._session.model).eval()
    pipe._session.model.eval()
    for rows in (8, 3):
        batch = case.batch(rows, F64)
        torch.testing.assert_close(pipe.evaluate(batch), loss_alone(alone, case.step, batch, 4), **tolerance)
        torch.testing.assert_close(pipe.forward(batch, logits), joined_alone(alone, logits, batch, 4), **tolerance)
    assert compiler.calls
    assert not compiler.failures


class Layers(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def step(model, batch):
    return model(batch["x"]).pow(2).mean()


def pipeline(model=None, rows=8, **options):
    torch.manual_seed(0)
    model = model or Layers(4).double()
    batch = {"x": torch.randn(rows, 8, dtype=torch.float64)}
    operators = operators_of(capture_step(model, step, {"x": batch["x"][: rows // 4]}))
    plan = even_plan(operators, 2, 4)
    return panpipe.pipeline(model, step, batch, **grouped(plan=plan, optimizer=torch.optim.SGD, **options)), batch


def test_equal_layers_of_all_stages_are_compiled_once_before_a_step():
    asked = []

    def counting(graph, examples):
        asked.append(graph)
        return graph.forward

    counts = []
    for layers in (8, 12):
        asked.clear()
        pipe, batch = pipeline(Layers(layers).double(), compile=counting)
        counts.append(len(asked))
        pipe.step(batch)
        assert len(asked) == counts[-1], "nothing is compiled in a step"
        pipe.close()
    assert counts[0] == counts[1] > 0


def test_group_that_does_not_compile_runs_without_compilation_and_warns():
    def failing(graph, examples):
        raise NotImplementedError("no kernels today\nsecond line")

    with pytest.warns(
        UserWarning, match=r"stage \d runs aten\..* without compilation: failing fails for them: no"
    ) as told:
        pipe, batch = pipeline(compile=failing)
    assert all("\n" not in str(one.message) for one in told)
    assert sorted(str(one.message)[:8] for one in told) == ["stage 0 ", "stage 1 "], "a line for each stage"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert abs(pipe.step(batch).item() - pipeline()[0].step(batch).item()) < 1e-12


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        (lambda graph, examples: lambda *given: [], r"it returns 0 tensors and not \d"),
        (
            lambda graph, examples: lambda *given: [r.float() for r in graph(*given)],
            r"it returns torch.float32 \[.*and",
        ),
        (
            lambda graph, examples: lambda *given: [given[0] for _ in graph(*given)],
            "it returns|shares memory",
        ),
    ],
)
def test_function_with_other_results_is_not_used(backend, why):
    with pytest.warns(UserWarning, match=why):
        pipe, batch = pipeline(compile=backend)
    assert abs(pipe.step(batch).item() - pipeline()[0].step(batch).item()) < 1e-12


def test_a_function_that_adds_nothing_to_the_gradients_is_not_used():
    def adding_nothing(graph, examples):
        return lambda *given: graph(*(tensor.clone() for tensor in given))

    with pytest.warns(UserWarning, match="what it adds to the gradients of parameters differs"):
        pipe, batch = pipeline(compile=adding_nothing)
    alone, _ = pipeline()
    pipe.step(batch)
    alone.step(batch)
    for one, other in zip(pipe._session.model.parameters(), alone._session.model.parameters(), strict=True):
        assert (one - other).abs().max() < 1e-12


@pytest.mark.parametrize("rows", [pytest.param(8, marks=pytest.mark.slow), 4])
def test_gradients_of_compiled_sections_are_added_up_where_the_optimizer_reads_them(rows):
    """Also in a second step, and with ``update=False``, where gradients are kept."""
    (pipe, batch), (alone, _) = pipeline(rows=rows, compile=as_it_is), pipeline(rows=rows)
    for update in (False, True, True):
        for one in (pipe, alone):
            one.step(batch, update=update)
    for one, other in zip(pipe._session.model.parameters(), alone._session.model.parameters(), strict=True):
        assert (one - other).abs().max() < 1e-12


def test_batch_with_other_strides_runs_what_was_compiled():
    def strict(graph, examples):
        strides = [example.stride() for example in examples]

        def call(*given):
            assert [tensor.stride() for tensor in given] == strides, "strides differ"
            return graph(*given)

        return call

    def first(model, batch):
        return model((batch["x"] + 1) * 2).pow(2).mean()

    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 8, dtype=torch.float64)}
    turned = {"x": batch["x"].t().contiguous().t()}
    losses = []
    for options in ({"compile": strict}, {}):
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).double()
        for parameter in model.parameters():
            parameter.data.fill_(0.1)
        operators = operators_of(capture_step(model, first, {"x": batch["x"][:4]}))
        pipe = panpipe.pipeline(
            model, first, batch, **grouped(plan=even_plan(operators, 2, 2), optimizer=torch.optim.SGD, **options)
        )
        pipe.step(batch)
        with warnings.catch_warnings(action="error"):
            losses.append(pipe.step(turned).item())
    assert abs(losses[0] - losses[1]) < 1e-12


def test_unknown_compiler_names_are_refused_with_the_known_ones():
    with pytest.raises(RequestError, match=r"compile is 'inductr': .*; known are .*inductor"):
        pipeline(compile="inductr")
    with pytest.raises(RequestError, match="compile is 'panpipe': it names a backend"):
        pipeline(compile="panpipe")
    with pytest.raises(RequestError, match=r"compile is 3: it names a backend of torch\.compile, or is a function"):
        pipeline(compile=3)


def test_missing_cpp_compiler_is_refused_in_one_line(monkeypatch):
    from torch._inductor import cpp_builder

    def missing():
        raise subprocess.CalledProcessError(1, "g++")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(RequestError, match=r"compile='inductor' needs a C\+\+ compiler and none is found here"):
        pipeline(compile="inductor")


def test_only_what_a_plan_runs_is_compiled():
    asked = []

    def counting(graph, examples):
        asked.append(graph)
        return graph.forward

    pipe, batch = pipeline(compile=counting)
    pipe.close()
    compiled = len(asked)
    asked.clear()
    operators = operators_of(capture_step(Layers(4).double(), step, {"x": batch["x"][:2]}))
    compiler, names = StageCompiler(CompilerChoice.of(counting)), [stage.nodes for stage in pipe.plan.stages]
    for index in range(2):
        compiler.programs(stage_graph(operators, names, index), index)
    assert compiled < len(asked)


# How Inductor is called: its files, its threads, and what its functions check.


def test_locale_in_which_inductor_cannot_read_its_files_is_refused_in_one_line(monkeypatch):
    def read(*_, **_options):
        b"\xe2".decode("ascii")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", read)
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
