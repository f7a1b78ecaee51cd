"""Runs the scripts of ``ordinary/``, each as its users would, as a pipeline and in one process.

A file of ``ordinary/`` has scripts in cells: ``# %% name``, or ``# %% name | tag, tag``. What comes before the first
cell belongs to each of them. A cell runs as a module of its own, so that ``model``, ``step``, ``batch`` and ``loss``
are its globals. Tags are for the tests: see `Script`.
"""

import contextlib
import io
import linecache
import os
import random
import re
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import panpipe
import torch
from attrs import field, frozen
from torch import Tensor, nn
from tqdm import tqdm

from .one_process import OneProcess, assigned_tensors, tensors_in

FOLDER = Path(__file__).with_name("ordinary")
_CELL = re.compile(r"^# %% (\w+)(?: \| (.*))?$", re.MULTILINE)


@frozen
class Script:
    """A script.

    Args:
        name: of its cell.
        file: that has the cell.
        line: the number of the cell's first line, from 1.
        source: its text; ``before`` is the text that all cells of the file share.
        tags: name → value. ``fast``: the fast suite trains it by the default call; ``ranks``: on two ranks. ``keyed``:
            it draws random numbers. ``warns=words``: a warning with these words is expected; ``may_warn=words``: it is
            allowed. ``refused=words``: the error that is expected. ``changes=n``: how many steps or evaluations change
            what the step reads, so that it is captured again, or end in Python, for which the main thread of a rank
            enters the step. ``float32``: it has no form in float64. ``near=x``: the
            largest difference, where float32 is a part of it. ``threads``: it uses parameters of all stages between
            steps, which ranks refuse. ``few``: it has too few operators for two stages a device.
    """

    name: str
    file: Path
    line: int
    source: str
    before: str
    tags: Mapping[str, str]

    @cached_property
    def near(self) -> float:
        return float(self.tags.get("near", 1e-9))


def scripts() -> dict[str, Script]:
    """All of them, by name."""
    found: dict[str, Script] = {}
    for file in sorted(FOLDER.glob("*.py")):
        text = file.read_text(encoding="utf-8")
        cells = list(_CELL.finditer(text))
        ends = [cell.start() for cell in cells[1:]] + [len(text)]
        for cell, end in zip(cells, ends, strict=True):
            assert cell[1] not in found, cell[1]
            tags = dict((*tag.strip().split("=", 1), "")[:2] for tag in (cell[2] or "").split(",") if tag.strip())
            line = text.count("\n", 0, cell.start()) + 1
            found[cell[1]] = Script(cell[1], file, line, text[cell.start() : end], text[: cells[0].start()], tags)
    return found


@frozen
class Results:
    """What a script computed.

    Args:
        numbers: losses, evaluations, results of forwards and metrics, in order.
        tensors: parameters, their gradients where nothing used them up, and buffers at the end.
        captures: number of calls of the pipeline in which the step's code ran in Python, beyond the first for each kind
            of call and shape of batch.
        warnings: texts.
    """

    numbers: list[float] = field(factory=list)
    tensors: dict[str, Tensor] = field(factory=dict)
    captures: list[str] = field(factory=list)
    warnings: list[str] = field(factory=list)


class Recorded:
    """A pipeline whose results are recorded; otherwise it is like the pipeline.

    Args:
        pipe: a pipeline, or what is like one.
        model: the user's.
        step: the user's.
        example: the batch with which the step was captured.
        results: where to write.
    """

    def __init__(self, pipe: Any, model: nn.Module, step: Any, example: Any, results: Results) -> None:
        self._pipe, self._model, self._step, self._results = pipe, model, step, results
        self._known: set[Any] = {self._kind("step", example)}

    def _kind(self, call: str, batch: Any) -> Any:
        """What may be captured once: smaller last microbatches come with the size of a batch, and plans of a contest
        with their stages."""
        modes = tuple(module.training for module in self._model.modules())
        stages = getattr(getattr(self._pipe, "plan", None), "stages", None)
        return call, tuple(tensor.shape for tensor in tensors_in(batch)), call == "step" or modes, stages

    def step(self, batch: Any, **options: Any) -> Tensor:
        return self._recorded("step", batch, lambda: self._pipe.step(batch, **options), self._step)

    def evaluate(self, batch: Any, *, step: Any = None) -> Tensor:
        return self._recorded("evaluate", batch, lambda: self._pipe.evaluate(batch, step=step), step or self._step)

    def forward(self, batch: Any, function: Any, **options: Any) -> Any:
        run = lambda: self._pipe.forward(batch, function, **options)  # noqa: E731
        return self._recorded("forward", batch, run, function)

    def _recorded(self, call: str, batch: Any, run: Callable[[], Any], function: Any) -> Any:
        if tqdm.monitor is not None:
            tqdm.monitor.woken = time.time() + 10 * len(self._results.numbers)  # as its thread does every 10 s
        with counting(function) as calls:
            found = run()
        kind = self._kind(call, batch)  # stages may have moved
        if calls and kind in self._known:
            self._results.captures.append(f"{call} {len(self._results.numbers)}")
        self._known.add(kind)
        self._results.numbers.extend(number for tensor in tensors_in(found) for number in tensor.flatten().tolist())
        self._results.numbers.extend(self._pipe.metrics.values())
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._pipe, name, value)

    def __enter__(self) -> "Recorded":
        self._pipe.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._pipe.__exit__(*error)


@contextlib.contextmanager
def counting(function: Any) -> Iterator[list[int]]:
    """The calls of a step in this thread while the context is open: a trace function sees calls and changes nothing."""
    while hasattr(function, "func"):
        function = function.func
    function = getattr(function, "__func__", function)
    code = function.__code__ if hasattr(function, "__code__") else type(function).__call__.__code__
    calls: list[int] = []

    def trace(frame: types.FrameType, event: str, argument: object) -> None:
        if frame.f_code is code:
            calls.append(frame.f_lineno)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield calls
    finally:
        sys.settrace(before)


def run(script: Script, make: Callable[..., Any], **options: Any) -> Results:
    """Run a script.

    Args:
        script: which.
        make: is called in place of ``panpipe.pipeline``.
        options: for it, in addition to the script's.
    """
    results, made = Results(), list[Any]()

    def pipeline(model: nn.Module, step: Any, example_batch: Any, **given: Any) -> Recorded:
        pipe = make(model, step, example_batch, **{"run": panpipe.Run(progress=False), **given, **options})
        made.append((pipe, model, given.get("optimizer")))
        return Recorded(pipe, model, step, example_batch, results)

    module = types.ModuleType(f"ordinary_{script.name}")
    module.__file__ = str(script.file)
    linecache.checkcache(module.__file__)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    before, public = torch.get_default_dtype(), panpipe.pipeline
    sys.modules[module.__name__] = module
    torch.set_default_dtype(torch.float32 if "float32" in script.tags else torch.float64)
    panpipe.pipeline = pipeline
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            for name in ("ema", "on_parameters"):
                of_pipelines = partial(_of_weights, name, getattr(panpipe.weights, name))
                stack.enter_context(mock.patch.object(panpipe.weights, name, of_pipelines))
            for offset, text in ((0, script.before), (script.line - 1, script.source)):
                exec(compile("\n" * offset + text, module.__file__, "exec"), module.__dict__)
        for _, model, optimizer in made:
            results.tensors.update(_tensors(model, gradients=optimizer is None))
    finally:
        for pipe, *_ in made:
            pipe.close()
        panpipe.pipeline = public
        torch.set_default_dtype(before)
        sys.modules.pop(module.__name__)
    results.warnings.extend(dict.fromkeys(str(one.message) for one in caught if _of_panpipe(one)))
    return results


def _of_weights(name: str, function: Callable[..., Any], pipe: Recorded, *args: Any) -> Any:
    """A function of ``panpipe.weights``, or what it does in one process."""
    inner = pipe._pipe
    return getattr(inner, name)(*args) if isinstance(inner, OneProcess) else function(inner, *args)


def _of_panpipe(caught: warnings.WarningMessage) -> bool:
    """Whether a warning is not one of another library's about itself."""
    return not issubclass(caught.category, DeprecationWarning | FutureWarning)


def _tensors(model: nn.Module, gradients: bool) -> dict[str, Tensor]:
    """What this process holds."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers()), **dict(assigned_tensors(model))}
    held = {name: tensor for name, tensor in named.items() if not tensor.is_meta}
    found = {name: tensor.detach().clone() for name, tensor in held.items()}
    if gradients:
        found.update({f"{name}.grad": t.grad.clone() for name, t in held.items() if t.grad is not None})
    return found


def alone(script: Script) -> Results:
    """In one process."""
    return run(script, OneProcess, keyed="keyed" in script.tags)


def differences(found: Results, wanted: Results, near: float) -> list[str]:
    """What is not equal: numbers all of them, tensors as far as this process holds them."""
    if len(found.numbers) != len(wanted.numbers):
        return [f"{len(found.numbers)} numbers instead of {len(wanted.numbers)}"]
    pairs = zip(found.numbers, wanted.numbers, strict=True)
    wrong = [f"{mine!r} instead of {right!r}" for mine, right in pairs if not abs(mine - right) < near]
    wrong += [f"{name} is there in the pipeline alone" for name in found.tensors.keys() - wanted.tensors]
    for name in found.tensors.keys() & wanted.tensors:
        mine, right = found.tensors[name].double(), wanted.tensors[name].double()
        if mine.shape != right.shape or not torch.allclose(mine, right, rtol=0, atol=near):
            wrong.append(f"{name} differs")
    return wrong


def problems(script: Script, found: Results, wanted: Results) -> list[str]:
    """Differences, captures without a change, and warnings without a reason."""
    wrong = differences(found, wanted, script.near)
    allowed = int(script.tags.get("changes", 0))
    if len(found.captures) > allowed:
        wrong.append(f"captured again by {found.captures}, and {allowed} of these calls followed a change")
    words = [script.tags[tag] for tag in ("warns", "may_warn") if tag in script.tags]
    texts = [text for text in found.warnings if text not in wanted.warnings]
    wrong += [f"warns: {text}" for text in texts if not any(word in text for word in words)]
    reports = os.environ.get("RANK", "0") == "0"  # one rank warns for all
    if reports and "warns" in script.tags and not any(words[0] in text for text in texts):
        wrong.append(f"no warning has {words[0]!r}")
    return wrong
