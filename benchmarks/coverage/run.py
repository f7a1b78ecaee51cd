"""How many models that nobody here wrote train as one process does, by the default call.

    python benchmarks/coverage/run.py SUITE [MODEL ...] --results FILE [--record FILE]

Each model is trained in a process of its own for two steps, on two batches, by ``panpipe.pipeline(model, step, batch,
optimizer=..., microbatches=4)``, and in plain PyTorch over the same microbatches with the same random numbers: dropout
and BatchNorm stay as they are. A model is

- right: losses, gradients, parameters and buffers are equal, within rounding;
- right with options: the default call is refused with a message, and with what it asks for, ``batch_dims`` or
  ``microbatches=1`` for a batch that is one sample, the model is right;
- refused: an error of panpipe's, with its message;
- wrong: something differs, or is not finite;
- crashed: any other error, the end of the process, or no end in time;
- not built: the model cannot be made or trained here in plain PyTorch.

Training is in float32; a distance above rounding is measured again in float64, which decides. Weights are random;
batches are synthetic and small. timm and torchvision are installed in addition.
"""

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import panpipe
import torch
from panpipe.benchmarks.coverage.suites import SUITES, Case
from panpipe.benchmarks.driver import argument_parser, commit, report
from panpipe.runtimes.diagnose.parity import Distance, with_gradients
from torch.utils import _pytree as pytree

TITLES = {"torchbench": "TorchBench", "timm_models": "timm", "torchvision_models": "torchvision"}
OUTCOMES = ("right", "right with options", "refused", "wrong", "crashed", "not built")
MICROBATCHES = 4
LIMIT_S = 900
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-9}
OPTIMIZER = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
Result = dict[str, Any]


def built(build: Callable[[], Case], dtype: torch.dtype = torch.float32, seed: int = 1) -> Case:
    """A case, the same one each time for a seed."""
    torch.set_default_dtype(dtype)
    torch.manual_seed(seed)
    case = build()
    if dtype is torch.float32:
        return case

    def convert(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return Case(case.model.double(), case.step, pytree.tree_map(convert, case.batch), case.options)


def reference(case: Case, batch: Any, index: int) -> torch.Tensor:
    """The loss of a step in plain PyTorch, which leaves the gradients in the parameters."""
    return panpipe.reference_step(
        case.model, case.step, batch, index=index, **{"microbatches": MICROBATCHES, **case.options}
    )


def distance(build: Callable[[], Case], dtype: torch.dtype, **options: Any) -> Distance:
    """The distance of a pipeline to plain PyTorch after some steps, relative to what is larger than 1."""
    case, plain = built(build, dtype), built(build, dtype)
    others = [(built(build, dtype, seed=2).batch, built(build, dtype, seed=2).batch)]
    pipe = panpipe.pipeline(
        case.model, case.step, case.batch,
        optimizer=OPTIMIZER, run=panpipe.Run(progress=False), **{"microbatches": MICROBATCHES, **options},
    )  # fmt: skip
    update = OPTIMIZER([each for each in plain.model.named_parameters() if each[1].requires_grad])
    found = Distance()
    for index, (batch, same) in enumerate([(case.batch, plain.batch), *others]):
        loss, wanted = pipe.step(batch), reference(plain, same, index)
        found = found.with_undefined(wanted).with_distance("loss", _apart(loss, wanted), f"step {index}")
        found = with_gradients(found, case.model, plain.model)
        update.step()
    pipe.close()
    for kind, mine, theirs in (
        ("parameter", dict(case.model.named_parameters()), dict(plain.model.named_parameters())),
        ("buffer", dict(case.model.named_buffers()), dict(plain.model.named_buffers())),
    ):
        for name, tensor in theirs.items():
            found = found.with_distance(kind, _apart(mine[name], tensor), name)
    return found


def _apart(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    if not theirs.numel():
        return 0.0
    far = (mine.detach().double() - theirs.detach().double()).abs().max()
    return float(far / theirs.detach().double().abs().max().clamp(min=1))


def compared(build: Callable[[], Case], options: dict[str, Any]) -> Result:
    """How far a pipeline is from plain PyTorch, and whether that is rounding."""
    found = distance(build, torch.float32, **options)
    equal = found.within(0, 0)
    for dtype, tolerance in TOLERANCES.items():
        found = found if dtype is torch.float32 else distance(build, dtype, **options)
        if found.within(tolerance, tolerance):
            return {"outcome": "right", "equal": equal, "distance": str(found)}
    return {"outcome": "wrong", "equal": equal, "problem": str(found)}


def trained(build: Callable[[], Case]) -> Result:
    """What training a model showed."""
    try:
        case = built(build)
        result: Result = {"loss": float(reference(case, case.batch, 0)), "problem": "", "refusals": [], "warnings": []}
    except Exception as error:
        return {"outcome": "not built", "problem": _text(error), "trace": traceback.format_exc()}
    for options in ({}, case.options):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                result |= compared(build, options)
            except Exception as error:
                refused = isinstance(error, panpipe.PanpipeError) and not isinstance(error, panpipe.WorkerError)
                outcome = "refused" if refused else "crashed"
                result |= {"outcome": outcome, "problem": _text(error), "trace": traceback.format_exc()}
                result["refusals"].append(_text(error))
        result["warnings"] += sorted({str(each.message) for each in warned} - {*result["warnings"]})
        if options and result["outcome"] == "right":
            result["outcome"] = "right with options"
        if result["outcome"] != "refused":
            break
    return result


def _text(error: BaseException) -> str:
    kind = "" if isinstance(error, panpipe.PanpipeError) else f"{type(error).__name__}: "
    return f"{kind}{error}"


def in_process(arguments: argparse.Namespace, name: str) -> Result:
    """What training a model showed, in a process of its own within a limit of time."""
    options = ["--results", "", "--here"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PANPIPE_CACHE": ""}
    start = time.monotonic()
    try:
        process = subprocess.run(
            [sys.executable, __file__, arguments.suite, name, *options], check=False, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env=variables, encoding="utf-8", errors="replace", timeout=LIMIT_S,
        )  # fmt: skip
        problem, said = f"the process ended ({process.returncode})", process.stdout
    except subprocess.TimeoutExpired:
        problem, said = f"no end within {LIMIT_S} s", ""
    last = said.rstrip().rpartition("\n")[2]
    result: Result = {"outcome": "crashed", "problem": problem, "trace": said}
    if last.startswith("{"):
        result = json.loads(last)
    return {"suite": arguments.suite, "model": name, **result, "seconds": round(time.monotonic() - start, 1)}


def table(results: list[Result]) -> list[tuple[str, ...]]:
    """A row for each model."""
    rows = []
    for each in results:
        message = each.get("problem") or (each.get("refusals") or [""])[0]
        rows.append((each["model"], each["outcome"], "yes" if each.get("equal") else "", _cell(message)))
    return rows


def _cell(text: str) -> str:
    """A message on one line, with files by their paths in packages."""
    folder = r"/\S*/(?:site-packages/|(?=benchmarks/))"
    text = re.sub(folder, "", " ".join(text.split())).replace("|", "\\|")
    return text if len(text) < 400 else f"{text[:400]} …"


def main() -> None:
    """Train the models of a suite, one process after another."""
    parser = argument_parser(__doc__, here=(False, "train one model in this process and print JSON"))
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("models", nargs="*", help="all of the suite by default")
    parser.add_argument("--results", required=True, help="file to append results to, one JSON object a line")
    arguments = parser.parse_args()
    models = SUITES[arguments.suite]()
    if arguments.here:
        torch.set_num_threads(1)
        print(json.dumps(trained(models[arguments.models[0]])))
        sys.stdout.flush()
        os._exit(0)  # threads that a failed run left do not delay the next model
    results = []
    for name in arguments.models or models:
        result = in_process(arguments, name)
        results.append(result)
        print(f"{name}: {result['outcome']}, {result['seconds']:.0f} s {_cell(result.get('problem', ''))}", flush=True)
        with Path(arguments.results).open("a", encoding="utf-8") as file:
            print(json.dumps({"commit": commit(), **result}), file=file)
    counts, equal = Counter(each["outcome"] for each in results), sum(bool(each.get("equal")) for each in results)
    outcomes = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
    title = f"{TITLES[arguments.suite]}: {outcomes} of {len(results)}; {equal} bit-equal to plain PyTorch"
    report(arguments.record, title, ("model", "outcome", "bit-equal", "message"), table(results))


if __name__ == "__main__":
    main()
