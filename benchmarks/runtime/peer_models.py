"""How many models of the zoo ``torch.distributed.pipelining`` trains as one process does.

Each model is given to its ``pipeline`` (export and cut) with the arguments that the training step calls it with and one
split point: the middle of the largest list of layers that it has, and if that fails, of the next largest, three at
most. The rest of the step is the loss function, on the last stage. Two gloo processes run three microbatches by its
GPipe schedule; gradients are compared with those of the eager model on the same microbatches, with the zoo's
tolerances. Its random numbers are not those of one process, so dropout is off for both. A model is

- right: all gradients are equal within the tolerance;
- wrong: a gradient differs, or is on no stage;
- not captured: the export or the cut fails, there is no list of layers to cut, or the step calls the model more than
  once;
- not run: the step fails, or takes longer than a limit.

``make zoo`` has the same table for panpipe, by more plans and with dropout on.

    python benchmarks/runtime/peer_models.py [MODEL ...] [--record FILE]
"""

import copy
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, ScheduleGPipe, SplitPoint, pipeline
from torch.nn import functional
from torch.utils import _pytree as pytree

from benchmarks.driver import argument_parser, report
from tests.laws.zoo.entry import Entry
from tests.laws.zoo.models import ZOO

ROWS, MICROBATCHES, SPLITS, LIMIT_S = 6, 3, 3, 200
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
SMALLEST_SHARE = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Gradients whose norm is a smaller share of that of all gradients are compared relative to this share."""


class Example:
    """A model of the zoo with its batch in microbatches.

    Args:
        entry: of the zoo.
    """

    def __init__(self, entry: Entry) -> None:
        self.dtype = torch.float64 if entry.float64 else torch.float32
        torch.manual_seed(0)
        self.model = without_dropout(entry.make().train().to(self.dtype))
        self._step = entry.step
        leaves, structure = pytree.tree_flatten(entry.batch(ROWS))
        pieces = [self._pieces(leaf) for leaf in leaves]
        self.microbatches = [
            pytree.tree_unflatten([piece[i] for piece in pieces], structure) for i in range(MICROBATCHES)
        ]

    def _pieces(self, leaf: Any) -> Sequence[Any]:
        if not isinstance(leaf, Tensor):
            return [leaf] * MICROBATCHES
        return (leaf.to(self.dtype) if leaf.is_floating_point() else leaf).chunk(MICROBATCHES)

    def loss(self, model: nn.Module, index: int) -> Tensor:
        """The loss of a microbatch. What the step draws itself is the same each time."""
        torch.manual_seed(index)
        result = self._step(model, self.microbatches[index])
        while not isinstance(result, Tensor):
            result = result["loss"] if isinstance(result, dict) else result[0]
        return result

    def calls(self) -> tuple[list[tuple[Any, Any]], Any]:
        """Arguments of the model's call in each microbatch's step, and the structure of its output.

        Raises:
            RuntimeError: the step does not call the model once.
        """
        found, model = [], copy.deepcopy(self.model)
        model.register_forward_hook(lambda _, args, kwargs, out: found.append((args, kwargs, out)), with_kwargs=True)
        for index in range(MICROBATCHES):
            self.loss(model, index)
        if len(found) != MICROBATCHES:
            raise RuntimeError(f"the step calls the model {len(found) / MICROBATCHES:g} times")
        return [call[:2] for call in found], pytree.tree_flatten(found[0][2])[1]

    def loss_of(self, output: Any, index: int, structure: Any) -> Tensor:
        """The loss of a microbatch from the model's output, as a loss function of a pipeline takes it."""
        model = copy.copy(self.model)
        whole = pytree.tree_unflatten(pytree.tree_leaves(output), structure)
        model.forward = lambda *_, **__: whole
        return self.loss(model, index)


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with all its dropout probabilities at 0."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)
    return model


def split_points(model: nn.Module) -> list[str]:
    """Names of layers in the middle of the model's lists of layers, those with the most parameters first."""
    lists = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            middle = list(module._modules)[len(module) // 2]
            lists.append((sum(parameter.numel() for parameter in module.parameters()), f"{name}.{middle}".lstrip(".")))
    return [name for _, name in sorted(lists, key=lambda each: -each[0])][:SPLITS]


def _said(error: Exception) -> str:
    """The cause of a failure, in a line."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    return f"{type(cause).__name__}: {cause}".strip().split("\n", 1)[0]


def cut(model: nn.Module, call: tuple[Any, Any]) -> tuple[Pipe | None, str]:
    """The model in two stages, or why there are none."""
    problem = "has no list of layers to cut"
    for name in split_points(model):
        try:
            found = pipeline(model, call[0], call[1], split_spec={name: SplitPoint.BEGINNING})
        except Exception as error:
            problem = _said(error)
            continue
        if found.num_stages == 2:
            return found, ""
        problem = f"{found.num_stages} stages for a split point at {name}"
    return None, problem


def run_rank(rank: int, pipe: Pipe, example: Example, folder: str) -> None:
    """One process of the step; writes its gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    calls, structure = example.calls()
    stage = pipe.build_stage(rank, torch.device("cpu"))

    def loss(output: Any, target: Tensor) -> Tensor:
        return example.loss_of(output, int(target), structure)

    schedule = ScheduleGPipe(stage, n_microbatches=MICROBATCHES, loss_fn=loss)
    if rank == 0:
        args, kwargs = _whole(calls)
        schedule.step(*args, **kwargs, return_outputs=False)
    else:
        schedule.step(target=torch.arange(MICROBATCHES), return_outputs=False)
    gradients = {name: parameter.grad for name, parameter in stage.submod.named_parameters()}
    torch.save(gradients, f"{folder}/rank{rank}.pt")
    dist.barrier()


def _whole(calls: Sequence[Any]) -> Any:
    """Arguments for the whole batch."""
    flat = [pytree.tree_flatten(call) for call in calls]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [
        torch.cat(column) if isinstance(column[0], Tensor) and column[0].dim() else column[0] for column in columns
    ]
    return pytree.tree_unflatten(joined, flat[0][1])


def reference(example: Example) -> dict[str, Tensor | None]:
    """Gradients of the eager model on the same microbatches."""
    model = copy.deepcopy(example.model)
    for index in range(MICROBATCHES):
        (example.loss(model, index) / MICROBATCHES).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def difference(wanted: dict[str, Tensor | None], found: dict[str, Tensor | None], dtype: torch.dtype) -> str:
    """What differs first, or ""."""
    norm = torch.stack([each.norm() for each in wanted.values() if each is not None]).norm()
    for name, gradient in wanted.items():
        if gradient is None or not gradient.abs().max():
            continue
        there = found.get(name)
        if there is None:
            return f"{name} has no gradient on any stage"
        floor = SMALLEST_SHARE[dtype] * norm
        far = float((there - gradient).norm() / torch.maximum(gradient.norm(), floor))
        if not far <= TOLERANCE[dtype]:
            return f"the gradient of {name} is {far:.0e} off"
    return ""


def check(name: str, result: str) -> None:
    """Check one model, in a process of its own, and write the outcome and its cause."""
    warnings.simplefilter("ignore")
    functional.dropout = lambda input, *_, **__: input
    logging.disable(logging.CRITICAL)
    entry = ZOO[name]

    def end(outcome: str, problem: str = "") -> None:
        Path(result).write_text(json.dumps([outcome, problem]), encoding="utf-8")

    try:
        example = Example(entry)
        wanted = reference(example)
        pipe, problem = cut(copy.deepcopy(example.model), example.calls()[0][0])
    except Exception as error:
        end("not captured", _said(error))
        return
    if pipe is None:
        end("not captured", problem)
        return
    end("not run", "a process died, or took too long")
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        try:
            run_rank(int(child != 0), pipe, example, folder)
            failure = ""
        except Exception as error:
            failure = _said(error)
        if child == 0:
            Path(f"{folder}/rank0").write_text(failure, encoding="utf-8")
            os._exit(0)
        os.waitpid(child, 0)
        # The rank that fails first says why; the other one says that it lost its peer.
        failures = [Path(f"{folder}/rank0").read_text(encoding="utf-8"), failure]
        if any(failures):
            end("not run", min(filter(None, failures), key=lambda said: "gloo" in said))
            return
        found = {**torch.load(f"{folder}/rank0.pt"), **torch.load(f"{folder}/rank1.pt")}
    differs = difference(wanted, found, example.dtype)
    end("wrong" if differs else "right", differs)


def outcomes(names: Sequence[str], workers: int) -> Iterator[tuple[str, str, str]]:
    """(model, outcome, cause) of every model, some at the same time. A model that takes too long is ended."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(names), []
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < workers:
                name, file = waiting.pop(0), f"{folder}/{len(waiting)}"
                process = context.Process(target=_in_own_group, args=(name, file))
                process.start()
                running.append((name, file, process, time.monotonic()))
            time.sleep(0.1)
            for entry in list(running):
                name, file, process, start = entry
                if process.is_alive() and time.monotonic() - start < LIMIT_S:
                    continue
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
                running.remove(entry)
                known = Path(file).exists()
                outcome, problem = json.loads(Path(file).read_text("utf-8")) if known else ("not captured", "it hangs")
                yield name, outcome, problem


def _in_own_group(name: str, file: str) -> None:
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    check(name, file)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="MODEL", help="models; all that panpipe trains by default")
    parser.add_argument("--workers", type=int, default=2, help="how many at the same time")
    arguments = parser.parse_args()
    names = arguments.names or [name for name, entry in ZOO.items() if not entry.refusal]
    rows = []
    for name, outcome, problem in outcomes(names, arguments.workers):
        print(f"{name}: {outcome}{': ' if problem else ''}{problem}", flush=True)
        rows.append((name, ZOO[name].source, outcome, problem.replace("|", "/")[:160]))
    count = Counter(outcome for _, _, outcome, _ in rows)
    summary = ", ".join(f"{count[kind]} {kind}" for kind in ("right", "wrong", "not captured", "not run"))
    print(f"{len(rows)} models: {summary}")
    title = f"torch.distributed.pipelining on {len(rows)} models of the zoo: {summary}"
    report(arguments.record, title, ("model", "from", "outcome", "cause"), sorted(rows))


if __name__ == "__main__":
    main()
