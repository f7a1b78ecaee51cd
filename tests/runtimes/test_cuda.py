"""The executor on one GPU that several devices of a pipeline share: order, overlap, memory and time.

Collected everywhere and skipped where no GPU is. What is asserted of time and memory is wide: `benchmarks/gpu` records
what they are.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import panpipe
import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.graph.randomness import GraphGenerators, bernoulli, random_key
from panpipe.core.errors import RequestError
from panpipe.core.trace.trace import COMPUTE_QUEUE
from panpipe.runtimes.diagnose.parity import reference_step
from panpipe.runtimes.offload.device_offload import pin, unpin
from panpipe.runtimes.programs.graphs.graph_pool import graph_pool
from torch import nn

from ..laws.grouped import grouped
from ..support.cuts import batch_on, captured, even_plan
from ..support.models import CASES

pytestmark = pytest.mark.cuda

GPT = "tied gpt with dropout"
ROOT = Path(__file__).parents[2]
MICROBATCHES = 8


def named(count: int) -> str:
    return ",".join(["cuda:0"] * count)


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_that_share_a_gpu_by_name_train_as_one_process_on_it(stages):
    case = CASES[GPT]
    plan = even_plan(captured(case, torch.float64, 8, 4, "cuda"), stages, 4)
    pipe = panpipe.pipeline(
        case.model(torch.float64), case.step, case.batch(8, torch.float64), plan=plan, optimizer=torch.optim.SGD,
        devices=named(stages), run=panpipe.Run(share_devices=True, seed=3),
    )  # fmt: skip
    alone = case.model(torch.float64).to("cuda:0")
    optimizer = torch.optim.SGD(alone.parameters())
    for index in range(3):
        loss = pipe.step(case.batch(8, torch.float64)).item()
        batch = batch_on(case, 8, torch.float64, "cuda:0")
        wanted = reference_step(alone, case.step, batch, microbatches=4, seed=3, index=index).item()
        assert abs(loss - wanted) < 1e-10
        optimizer.step()
    for one, other in zip(pipe._session.model.parameters(), alone.parameters(), strict=True):
        assert one.device == torch.device("cuda", 0)
        assert (one - other).abs().max().item() < 1e-9


def test_sharing_a_gpu_needs_share_devices():
    case = CASES[GPT]
    plan = even_plan(captured(case, torch.float64, 8, 4, "cuda"), 4, 4)
    with pytest.raises(RequestError, match="devices 0 and 1 of the pipeline are both cuda:0"):
        panpipe.pipeline(case.model(torch.float64), case.step, case.batch(8, torch.float64), plan=plan,
                         devices=named(4))  # fmt: skip


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(self.linear(self.norm(x)))


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).pow(2).mean()


def layers(width: int, count: int = 8, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual(width) for _ in range(count))).to(dtype)


def batch_of(width: int, rows: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(dtype)}


def even_pipeline(
    width: int, rows: int, stages: int = 2, dtype: torch.dtype = torch.float32, count: int = 8, **options
):  # fmt: skip
    """A pipeline on one GPU with a plan made by hand, warm."""
    batch = batch_of(width, rows, dtype)
    piece = {"x": batch["x"][: rows // MICROBATCHES].to("cuda:0")}
    captured = capture_step(layers(width, count, dtype), step, piece, device="cuda")
    plan = even_plan(operators_of(captured), stages, MICROBATCHES)
    pipe = panpipe.pipeline(
        layers(width, count, dtype), step, batch,
        **grouped(plan=plan, optimizer=torch.optim.AdamW, devices=named(stages), share_devices=True, **options),
    )  # fmt: skip
    for _ in range(3):
        pipe.step(batch)
    return pipe, batch


def test_the_host_waits_for_nothing_inside_a_warm_step():
    pipe, batch = even_pipeline(256, 64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pipe.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_returns_before_the_device_has_finished_it():
    pipe, batch = even_pipeline(4096, 8192)
    torch.cuda.synchronize()
    loss = pipe.step(batch)
    assert not torch.cuda.current_stream(loss.device).query()
    assert loss.isfinite().item()


def test_copies_overlap_with_compute():
    pipe, batch = even_pipeline(4096, 8192)
    _, trace = pipe.trace_step(batch)
    compute = [(e.start_s, e.end_s) for e in trace.events if e.queue == COMPUTE_QUEUE]
    copies = [(e.start_s, e.end_s) for e in trace.events if e.action.peer is not None]
    assert len(copies) == 2 * 2 * MICROBATCHES
    assert all(end >= start for start, end in copies)
    overlap = [any(begin < end and start < until for begin, until in compute) for start, end in copies]
    assert sum(overlap) > len(copies) // 4


def step_times(pipe, batch, steps, wait=True):
    """Seconds of each step, or only of the host that issues it, with the device idle at its beginning."""
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        pipe.step(batch)
        if wait:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times


def test_issuing_an_action_takes_the_host_less_than_a_millisecond():
    pipe, batch = even_pipeline(8, 8, count=2)
    actions = max(len(actions) for actions in pipe.plan.device_actions)
    assert min(step_times(pipe, batch, 20, wait=False)) / actions < 1e-3


def planned(stages: int):
    """A pipeline planned on the GPU itself, with a prediction from its profile, warm."""
    batch = batch_of(1024, 4096)
    pipe = panpipe.pipeline(
        layers(1024), step, batch, microbatches=MICROBATCHES, optimizer=torch.optim.AdamW, devices=named(stages),
        plan=panpipe.Auto(schedule="1f1b", max_chunks=1), run=panpipe.Run(share_devices=True),
    )  # fmt: skip
    for _ in range(3):
        pipe.step(batch)
    return pipe, batch


@pytest.mark.parametrize("stages", [2, 4])
def test_the_allocators_peak_and_the_step_time_are_near_those_predicted(stages):
    pipe, batch = planned(stages)
    prediction = pipe.plan.prediction
    before = torch.cuda.memory_allocated() - sum(p.nbytes for p in pipe._session.model.parameters())
    torch.cuda.reset_peak_memory_stats()
    assert prediction.step_s == pytest.approx(statistics.median(step_times(pipe, batch, 5)), rel=0.5)
    # Gradients and the optimizer's state stood there before the steps; nothing else of other tests may.
    assert before >= 0
    assert torch.cuda.max_memory_allocated() <= 1.25 * sum(prediction.peak_memory_bytes) + before


def test_the_peak_is_that_of_one_process_and_what_more_microbatches_hold():
    batch, alone = batch_of(1024, 4096), layers(1024).to("cuda:0")
    optimizer = torch.optim.AdamW(alone.parameters())
    here = {"x": batch["x"].to("cuda:0")}
    for index in range(2):
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        reference_step(alone, step, here, microbatches=MICROBATCHES, index=index)
        optimizer.step()
    one = torch.cuda.max_memory_allocated() - start
    del alone, optimizer, here
    pipe, batch = even_pipeline(1024, 4096)
    _, trace = pipe.trace_step(batch)  # the reference workload, which a trace also runs, has memory of its own
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    pipe.step(batch)
    saved = sum(max((s.bytes for s in trace.memory if s.device == d), default=0) for d in (0, 1))
    size = batch["x"].nbytes  # the batch, on both devices, and messages that are under way
    assert torch.cuda.max_memory_allocated() - start <= 1.25 * one + saved + 3 * size


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_compiled_stages_train_like_others(dtype):
    (pipe, batch), (plain, _) = (even_pipeline(64, 64, dtype=dtype, compile=how) for how in ("inductor", None))
    near = 1e-9 if dtype is torch.float64 else 1e-4
    assert abs(pipe.step(batch).item() - plain.step(batch).item()) < near


SCRIPT = """
import json, sys, torch, panpipe
from torch import nn
def step(model, batch):
    return model(batch["x"]).pow(2).mean()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
batch = {"x": torch.randn(8, 8)}
options = json.loads(sys.argv[1])
pipe = panpipe.pipeline(model, step, batch, microbatches=4, plan="1f1b",
                        optimizer=torch.optim.SGD, **options)
print(json.dumps([pipe.step(batch).item() for _ in range(3)]))
pipe.close()
"""


def ranks_of(count: int, **options) -> list[tuple[int, str, str]]:
    """Status, output and errors of ranks that all see one GPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    shared["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    started = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", SCRIPT, json.dumps(options)], cwd=ROOT.parent, text=True,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        )
        for rank in range(count)
    ]  # fmt: skip
    told = [process.communicate(timeout=300) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, told, strict=True)]


def test_one_rank_over_nccl():
    ((status, out, err),) = ranks_of(1, backend="nccl", devices="cuda:0", mesh="pp=1")
    assert status == 0, err[-3000:]
    losses = json.loads(out.splitlines()[-1])
    assert losses[0] > losses[-1] > 0


def test_two_ranks_on_one_gpu_are_refused_by_nccl_and_go_over_gloo():
    for status, _, err in ranks_of(2, backend="nccl", devices="cuda:0,cuda:0", share_devices=True, mesh="pp=2"):
        assert status != 0
        assert "NCCL needs one GPU per rank" in err, err[-3000:]
    done = ranks_of(2, devices="cuda:0,cuda:0", share_devices=True, mesh="pp=2")
    assert [status for status, _, _ in done] == [0, 0], done
    assert done[0][1] == done[1][1]
    assert "over gloo" in done[0][2]


def test_memory_that_cannot_be_pinned_leaves_no_error_for_the_next_kernel():
    memory, device = torch.zeros(1 << 20, dtype=torch.uint8), torch.device("cuda", 0)
    assert pin(memory, device)
    try:
        assert not pin(memory, device)  # it is pinned already
        assert torch.arange(4, device=device).sum().item() == 6
    finally:
        unpin(memory, device)


def test_pool_captures_draws_and_gives_freed_memory_to_later_graphs():
    device = torch.device("cuda", 0)
    pool, generators = graph_pool(device), GraphGenerators(device, [4, 9])
    source, total = torch.ones(1 << 20, device=device), torch.zeros(1 << 20, device=device)
    addresses, no_key = [], torch.full((3,), -1)

    def run():
        for ordinal in (4, 9):
            drawn = bernoulli(source, 0.5, no_key, ordinal)
            addresses.append(drawn.data_ptr())
            total.add_(drawn)
            del drawn

    with torch.cuda.stream(torch.cuda.Stream(device)):
        first, second = pool.capture(run, generators), pool.capture(run, generators)
        with pool.allocating():
            kept = torch.empty_like(source)
        assert (total == 0).all()
        for step in range(2):
            key = random_key(1, step, 0)
            total.zero_()
            for graph in (first, second):
                generators.seed(key)
                graph.replay()
            assert torch.equal(total, 2 * sum(bernoulli(source, 0.5, key, ordinal) for ordinal in (4, 9)))
    assert len({*addresses, kept.data_ptr()}) == 1
    alias = pool.alias(kept.view(1 << 10, 1 << 10).t())
    assert (alias.data_ptr(), alias.stride()) == (kept.data_ptr(), (1, 1 << 10))
    assert pool.bytes >= kept.nbytes


@pytest.mark.parametrize("compile", [None, "inductor"])
def test_graphs_train_like_the_programs_that_they_were_captured_from(compile):
    found = []
    for graphs in (False, True):
        pipe, batch = even_pipeline(64, 64, dtype=torch.float64, compile=compile, cuda_graphs=graphs)
        losses = [pipe.step(batch, update=index % 2 == 1) for index in range(4)]
        found.append([*losses, *pipe._session.model.parameters()])
        pipe.close()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_graphs_have_the_random_numbers_and_buffers_of_programs(case):
    plan = even_plan(captured(CASES[case], torch.float64, 8, 4, "cuda"), 4, 4)
    found = []
    for graphs in (False, True):
        pipe = panpipe.pipeline(
            CASES[case].model(torch.float64), CASES[case].step, CASES[case].batch(8, torch.float64), plan=plan,
            optimizer=torch.optim.SGD, devices=named(4),
            run=panpipe.Run(share_devices=True, seed=3, cuda_graphs=graphs),
        )  # fmt: skip
        losses = [pipe.step(CASES[case].batch(8, torch.float64)) for _ in range(3)]
        found.append([*losses, *pipe._session.model.parameters(), *pipe._session.model.buffers()])
        pipe.close()
    for one, other in zip(*found, strict=True):
        assert (one.double() - other.double()).abs().max().item() < 1e-9  # an embedding's backward adds in any order


def test_the_host_waits_for_nothing_inside_a_warm_step_of_graphs():
    pipe, batch = even_pipeline(256, 64, cuda_graphs=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pipe.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_issuing_a_step_of_graphs_takes_the_host_less_time():
    times = [min(step_times(*even_pipeline(256, 64, cuda_graphs=graphs), 10, wait=False)) for graphs in (False, True)]
    assert times[1] < times[0]
