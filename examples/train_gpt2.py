"""Train a byte-level GPT-2 on the source of Python's standard library, as a pipeline over the ranks of ``torchrun``.

    torchrun --nproc-per-node 2 examples/train_gpt2.py --out out/demo

The model is transformers' `GPT2LMHeadModel`, unchanged, with random weights; the text is on every machine with Python.
The first steps compare several plans. At the end it prints the loss, predicted and measured step time and memory, and a
check against one process, and writes two Perfetto traces and an HTML page. If a loss or gradient differs from one
process, the exit status is 1.
"""

import argparse
import copy
import functools
import os
import statistics
import sys
import sysconfig
import time
import warnings
from pathlib import Path

import panpipe
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import GPT2Config, GPT2LMHeadModel

SEQUENCE = 128
MICROBATCHES = 8
ROWS = 32


def standard_library_text(limit: int = 4_000_000) -> torch.Tensor:
    """Bytes of the standard library's own source, in the order of its file names; int64, shape (bytes,)."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text, dtype=torch.uint8).long()


def batches(text: torch.Tensor, count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Random windows of the text: inputs and the bytes that follow them; each of shape (ROWS, SEQUENCE)."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        starts = torch.randint(0, len(text) - SEQUENCE - 1, (ROWS,), generator=generator)
        windows = torch.stack([text[s : s + SEQUENCE + 1] for s in starts.tolist()])
        result.append({"input_ids": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()})
    return result


def make_model(seed: int = 0) -> GPT2LMHeadModel:
    """A GPT-2 of six layers over bytes, with dropout, and input and output embeddings tied as GPT-2 has them."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=256, n_positions=SEQUENCE, n_embd=256, n_layer=6, n_head=8, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def step(model: GPT2LMHeadModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """An ordinary training step: the loss of predicting each next byte."""
    logits = model(input_ids=batch["input_ids"]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def factory() -> tuple[GPT2LMHeadModel, object, dict[str, torch.Tensor]]:
    """For ``panpipe plan --model``: model, step and an example batch."""
    return make_model(), step, batches(standard_library_text(), 1)[0]


def quiet(message: str) -> None:
    """Print nothing: for all ranks but rank 0."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for plan, traces and report")
    parser.add_argument("--plan", default="auto", help="a plan file instead of planning")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*a tensor with a gradient was read.*")
    console = Console(stderr=True, highlight=False)
    rank = int(os.environ.get("RANK", "0"))
    say = functools.partial(console.print, soft_wrap=True) if rank == 0 else quiet

    text = standard_library_text()
    data = batches(text, arguments.steps + 2)
    model = make_model()
    untouched = copy.deepcopy(model)
    optimizer = functools.partial(torch.optim.AdamW, lr=5e-4)
    say(f"[bold]panpipe[/] trains {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters over two workers")
    begun = time.perf_counter()
    pipe = panpipe.pipeline(
        model, step, data[0], optimizer=optimizer, microbatches=MICROBATCHES, plan=arguments.plan,
    )  # fmt: skip
    say(f"  [dim]{time.perf_counter() - begun:5.1f} s  training begins[/]")

    losses, reference, results = check_against_one_process(pipe, model, untouched, optimizer, data[:2])
    compare_plans(pipe, text, losses)
    predicted = panpipe.simulate(pipe.plan)
    times, trace = train(pipe, data[2:], losses, rank == 0, console)
    single_s = one_process_time(untouched, optimizer, data[0]) if rank == 0 else 0.0
    if rank == 0:
        checks = [*results, *prediction_checks(predicted, trace, times)]
        finish(arguments.out, console, pipe, predicted, trace, losses, reference, times, single_s, checks)
    pipe.close()
    if rank == 0 and any(check.failed for check in results):
        sys.exit(1)  # only on rank 0, after the report: the other ranks end normally


def largest(value: float) -> float:
    """The maximum of a number over all ranks; infinite if it is NaN on one of them."""
    tensor = torch.tensor(value).nan_to_num(nan=float("inf"))
    if dist.is_initialized():
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def check_against_one_process(pipe, model, untouched, optimizer, data):
    """Two steps as a pipeline and two of the untouched eager model with the same random numbers."""
    reference_optimizer = optimizer(untouched.named_parameters())
    losses, reference, errors = [], [], [torch.zeros(())]
    for index, batch in enumerate(data):
        losses.append(pipe.step(batch).item())
        reference.append(panpipe.reference_step(untouched, step, batch, microbatches=MICROBATCHES, index=index).item())
        mine = dict(model.named_parameters())  # stages may move between steps while plans are compared
        for name, parameter in untouched.named_parameters():
            if not mine[name].is_meta:
                errors.append((mine[name].grad - parameter.grad).norm() / parameter.grad.norm())
        reference_optimizer.step()
    worst = largest(torch.stack(errors).max().item())
    found, wanted = torch.tensor(losses), torch.tensor(reference)
    loss_error = largest(((found - wanted).abs() / wanted).max().item())
    checks = [
        panpipe.traces.Check("loss of two steps, against one process", f"{loss_error:.1e} relative", loss_error < 1e-5),
        panpipe.traces.Check("gradients, worst tensor in norm", f"{worst:.1e} relative", worst < 1e-5),
    ]
    return losses, reference, checks


def compare_plans(pipe, text, losses):
    """Train until the plans are compared; the losses are added."""
    seed = 1
    while pipe.contest is not None and not pipe.contest.done:
        losses.append(pipe.step(batches(text, 1, seed=seed)[0]).item())
        seed += 1


def prediction_checks(predicted, measured, times):
    """Predicted and measured step time and peaks of saved tensors."""
    error = predicted.step_s / statistics.median(times) - 1
    peaks = [
        (f"predicted peak of saved tensors, worker {peak.device}", peak.peak.error or 0.0)
        for peak in panpipe.traces.compare(predicted.trace, measured).memory
        if peak.kind == "saved"
    ]
    return [
        panpipe.traces.Check(
            "predicted step time", f"{error:+.1%} of the median", abs(error) < 0.1, panpipe.traces.Checked.PREDICTION
        ),
        *(
            panpipe.traces.Check(name, f"{off:+.1%} of measured", abs(off) < 0.05, panpipe.traces.Checked.PREDICTION)
            for name, off in peaks
        ),
    ]


def train(pipe, data, losses, shows_progress, console):
    """Train over the batches. Returns step times, and the trace of the middle step."""
    times, trace = [], None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not shows_progress, auto_refresh=False) as progress:
        task = progress.add_task("training", total=len(data))
        for index, batch in enumerate(data):
            start, traced = time.perf_counter(), index == len(data) // 2
            if traced:
                loss, trace = pipe.trace_step(batch)
            else:
                loss = pipe.step(batch)
            losses.append(loss.item())  # on a GPU this waits for the step
            if not traced:
                times.append(time.perf_counter() - start)
            progress.update(task, advance=1, description=f"loss {losses[-1]:.3f}", refresh=True)
    return times, trace


def one_process_time(model, optimizer, batch, repeats=2):
    """Seconds of one training step of the eager model in this process, microbatch after microbatch."""
    trained = optimizer(model.named_parameters())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        trained.zero_grad()
        for part in range(MICROBATCHES):
            rows = {name: tensor.chunk(MICROBATCHES)[part] for name, tensor in batch.items()}
            (step(model, rows) / MICROBATCHES).backward()
        trained.step()
        times.append(time.perf_counter() - start)
    return min(times)


def finish(out, console, pipe, predicted, measured, losses, reference, times, single_s, checks):
    """Print the summary and write plan, traces and report."""
    out.mkdir(parents=True, exist_ok=True)
    median = statistics.median(times)
    error = predicted.step_s / median - 1
    spread = f"{min(times) * 1e3:.0f} to {max(times) * 1e3:.0f} ms"
    facts = panpipe.traces.ReportFacts(
        title="A byte-level GPT-2 over two workers", losses=losses, reference_losses=reference, step_times_s=times,
        one_process_step_s=single_s, checks=checks,
        notes=["A measured transfer ends when its reader has waited for it: gloo does not report its end earlier."],
    )  # fmt: skip
    pipe.plan.save(out / "plan.json")
    panpipe.traces.write_trace(predicted.trace, out / "predicted.json")
    panpipe.traces.write_trace(measured, out / "measured.json")
    panpipe.traces.write_report(
        out / "report.html", plan=pipe.plan, predicted=predicted.trace, measured=measured, facts=facts
    )
    console.print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {len(losses)} steps")
    console.print(f"step {median * 1e3:.0f} ms measured ({spread}), "
                  f"{predicted.step_s * 1e3:.0f} ms predicted ({error:+.1%}); "
                  f"one process {single_s * 1e3:.0f} ms, speed-up {single_s / median:.2f}×")  # fmt: skip
    console.print(f"bubble {predicted.bubble_ratio:.1%} predicted")
    for check in checks:
        mark = "[red]✗ wrong:[/]" if check.failed else "[yellow]! missed:[/]" if check.missed else "[green]✓[/]"
        console.print(f"{mark} {check.name}: {check.value}")
    console.print(f"plan, traces (open in ui.perfetto.dev) and report: {out}/")


if __name__ == "__main__":
    main()
