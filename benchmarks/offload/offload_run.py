"""A GPT-2 whose step needs more memory than its processes may have, trained with saved tensors in a file.

python benchmarks/offload/offload_run.py [--steps N] [--folder FOLDER] [--record FILE]

Two ranks over gloo, GPipe: the saved tensors of every microbatch are alive at once. Each kind of run has new processes:

- without a limit and without offload: resident memory and time of a step;
- without a limit, with offload to a file: likewise, and the same losses to the bit;
- under ``RLIMIT_DATA``, halfway between the two, without offload: the step does not fit;
- under the same limit with offload: it trains.

Resident memory is the operating system's peak of each rank (``VmHWM``) over the steps, without what was resident before
the first of them.
"""

import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import panpipe
import torch
import torch.distributed as dist
from attrs import evolve
from panpipe.core.actions import Action, Kind
from panpipe.core.capture.export.operators import Operators, operators_of, tensor_bytes
from panpipe.core.capture.export.step import capture_step
from panpipe.core.cluster.cluster import Hub, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts
from panpipe.core.plan.memory_policy import HostCopy, StageOffload
from panpipe.core.plan.plan import Plan, Prediction
from panpipe.core.policies.offload import host_slots
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search import even_plan
from panpipe.core.validation.validate import validate
from panpipe.runtimes.devices.available_memory import data_bytes
from panpipe.runtimes.offload.offloadable import offloadable_storages
from panpipe.runtimes.programs.compiled import Compiled, compile_stages
from torch import Tensor, nn

from benchmarks.driver import argument_parser, report, reset_resident_peak, resident_bytes

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 6, 256, 4, 512, 256
ROWS, MICROBATCHES, RANKS = 32, 8, 2
STACK = 8 << 20


def model() -> nn.Module:
    """A small GPT-2 of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, use_cache=False
    )
    return GPT2LMHeadModel(config).train()


def step(model: nn.Module, batch: Tensor) -> Tensor:
    """The language model's loss."""
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def batch() -> Tensor:
    """Tokens, the same in every run."""
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def plans(operators: Operators) -> tuple[Plan, Plan, Compiled]:
    """The plan without offload, the plan with all that can be offloaded, for as long as possible, and the programs."""
    sizes = {n: tensor_bytes(operators.values[p]) for p, n in operators.step.parameters.items()}
    plan = even_plan(operators.graph, find_family("gpipe").build(ScheduleProblem(RANKS, MICROBATCHES, 1)), sizes)
    compiled = compile_stages(operators, [stage.nodes for stage in plan.stages], range(RANKS))
    offload = []
    for stage in range(RANKS):
        storages = offloadable_storages(stage, compiled, plan.placement)
        actions = plan.device_actions[stage]
        copies = []
        for number in range(MICROBATCHES):
            freed = actions[actions.index(Action(stage, Kind.F, number)) + 1]
            back = actions[actions.index(Action(stage, Kind.B, number)) - 1]
            if actions.index(freed) < actions.index(back):
                copies.append(HostCopy(number, freed, back))
        offload.append(StageOffload(stage, storages, tuple(copies)))
    return plan, evolve(plan, memory=evolve(plan.memory, offload=tuple(offload))), compiled


def peaks(plan: Plan, compiled: Compiled) -> tuple[float, ...]:
    """The planned peak of saved tensors on each device, in bytes."""
    costs = [
        StageCosts(1.0, 1.0, 1.0, saved_bytes=each.memory.saved, freed_by_input_bytes=each.memory.freed_by_input,
                   created_by_input_bytes=each.memory.created_by_input)
        for each in (compiled.programs[stage] for stage in range(RANKS))
    ]  # fmt: skip
    links = fully_connected(RANKS, 1 << 50, 1e9, 0.0)
    to_host = tuple(Link(device.name, "host", 1e9, 0.0) for device in links.devices)
    cluster = evolve(links, hubs=(Hub("host", "host"),), links=(*links.links, *to_host))
    none = (0.0,) * RANKS
    found = validate(evolve(plan, prediction=Prediction(tuple(costs), cluster, 1.0, none, none, 0.0)))
    return found.peak_saved_bytes


def rank(folder: Path, steps: int, offload: bool, limit: int | None, disk: str) -> None:
    """One rank of a run; what it found goes to a file."""
    dist.init_process_group("gloo")
    made, tokens = model(), batch()
    operators = operators_of(capture_step(made, step, tokens[: ROWS // MICROBATCHES]))
    plain, away, compiled = plans(operators)
    plan = away if offload else plain
    planned = [before - after for before, after in zip(peaks(plain, compiled), peaks(away, compiled), strict=True)]
    del operators, compiled
    pipe = panpipe.pipeline(
        made,
        step,
        tokens,
        plan=plan,
        optimizer=torch.optim.SGD,
        memory=panpipe.Memory(offload_to=disk),
        run=panpipe.Run(progress=False),
    )
    gc.collect()
    reset_resident_peak()
    before, data = resident_bytes("VmRSS"), data_bytes()
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (data + limit, data + limit))
    found: dict[str, Any] = {"losses": [], "seconds": [], "failure": None}
    peak_data = 0
    try:
        for _ in range(steps):
            begun = time.perf_counter()
            found["losses"].append(pipe.step(tokens).item())
            found["seconds"].append(time.perf_counter() - begun)
            peak_data = max(peak_data, data_bytes() - data)
    except BaseException as error:
        found["failure"] = f"{type(error).__name__}: {error}"
    device = dist.get_rank()
    found |= {"resident": resident_bytes("VmHWM") - before, "data": peak_data, "planned": planned[device]}
    if offload:
        found["arena"], found["slots"] = pipe._trainer.offloads[device].memory.bytes, host_slots(away, device).bytes
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    if found["failure"] is not None:
        os._exit(0)  # the other rank has failed, too
    pipe.close()
    dist.destroy_process_group()


def run(steps: int, disk: str, *, offload: bool, limit: int | None = None, fits: bool = True) -> list[dict[str, Any]]:
    """Run both ranks in processes of their own; returns what each found. If the step need not fit, only what the ranks
    found that could write it: a rank that fails ends the other one."""
    with tempfile.TemporaryDirectory() as name:
        words = [__file__, "--rank-of", name, "--steps", str(steps), "--folder", disk]
        words += ["--offload"] * offload + (["--limit", str(limit)] if limit is not None else [])
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        subprocess.run([*command, *words], check=fits, timeout=1500, stderr=None if fits else subprocess.DEVNULL)
        files = [Path(name) / f"{each}.json" for each in range(RANKS)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files if fits or file.exists()]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", default="disk", help="folder of the file; by default that for temporary files")
    parser.add_argument("--rank-of", type=Path, help=SUPPRESS)
    parser.add_argument("--offload", action="store_true", help=SUPPRESS)
    parser.add_argument("--limit", type=int, help=SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank_of is not None:
        rank(options.rank_of, options.steps, options.offload, options.limit, options.folder)
        return
    plain, away = (run(options.steps, options.folder, offload=offload) for offload in (False, True))
    assert [each["losses"] for each in plain] == [each["losses"] for each in away], "offload changed a loss"
    limit = (max(each["resident"] for each in plain) + max(each["resident"] for each in away)) // 2
    refused = run(options.steps, options.folder, offload=False, limit=limit, fits=False)
    fits = run(options.steps, options.folder, offload=True, limit=limit)
    failure = next(each["failure"] for each in refused if each["failure"])
    assert fits[0]["losses"] == plain[0]["losses"], fits
    rows = []
    mib = 1 << 20
    for number, (one, other) in enumerate(zip(plain, away, strict=True)):
        planned = other["planned"]
        fell = one["resident"] - other["resident"]
        seconds = [statistics.median(each["seconds"][1:] or each["seconds"]) for each in (one, other)]
        rows.append(
            [
                str(number), f"{one['resident'] / mib:.0f}", f"{other['resident'] / mib:.0f}", f"{fell / mib:.0f}",
                f"{planned / mib:.0f}", f"{fell / planned:.0%}", f"{other['arena'] / mib:.1f}",
                f"{other['slots'] / mib:.1f}", f"{seconds[0]:.2f}", f"{seconds[1]:.2f}",
            ]
        )  # fmt: skip
    title = (
        f"Offload to a file: GPT-2 of {LAYERS} layers, width {WIDTH}, {RANKS} gloo ranks, GPipe, {MICROBATCHES} "
        f"microbatches; under RLIMIT_DATA of {limit / mib:.0f} MiB above what is there before the first step it trains "
        f"with offload and not without ({failure[:160]})"
    )
    header = (
        "rank", "resident MiB without", "with", "fell by", "planned", "of it", "arena", "arena of the plan",
        "step s without", "with",
    )  # fmt: skip
    report(options.record, title, header, rows)


if __name__ == "__main__":
    main()
