"""The order of the executor and memcpy on streams, for several plans: reads follow writes, reuse follows the last use.

No GPU is needed: operators run on the CPU, and recorded streams report what an asynchronous device could have run in
another order.
"""

import pytest
import torch
from panpipe.answers.profile_links import measure_links
from panpipe.backends import streams
from panpipe.core.actions import SEND_KINDS
from panpipe.runtimes.engine.step_graphs import StepGraphs
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.offload.copies import StreamCopies
from panpipe.runtimes.profile.measured_cluster import measured_cluster
from panpipe.runtimes.programs.graphs import graph_pool
from panpipe.runtimes.trainer import Trainer
from panpipe.runtimes.update.stage_state import StageState

from ..support.backends.fake_graphs import FakeGraphPool
from ..support.backends.recorded_streams import RecordedStreams
from ..support.cuts import batch_on, captured_once, even_plan
from ..support.models import CASES
from ..support.offloading import all_away
from ..support.parity import PLANS, build
from ..support.ranks.teams import pipeline_on
from ..support.training import SGD, pipeline_of

CPU = torch.device("cpu")
GPT = "tied gpt with dropout"


def train(recorded, monkeypatch, plan, *, case=GPT, rows=8, microbatches=4, devices=2, user=None, given=None):
    """Train on recorded streams; between steps the user's code runs operators on the default stream or another one."""
    monkeypatch.setitem(streams._KINDS, "cpu", recorded)
    with recorded.using(user or recorded.current(CPU)):
        pipe = build(ThreadTeam(devices), case, torch.float64, rows, given, microbatches, **PLANS[plan])
        for _ in range(2):
            batch = batch_on(CASES[case], rows, torch.float64, "cpu")
            for tensor in batch.values():
                tensor.add_(0)  # the user makes the batch on the device, just now
            pipe.step(batch)
            del batch
            for parameter in pipe._session.model.parameters():
                parameter.grad.mul_(1.0)
                parameter.detach().mul_(1.0)
    return pipe


@pytest.mark.parametrize("plan", ["1f1b", "interleaved", "split backward", "zb-v", "recompute", "gpipe", "gis-h"])
def test_every_operation_is_ordered_after_its_inputs(plan, monkeypatch):
    recorded = RecordedStreams()
    pipe = train(recorded, monkeypatch, plan)
    assert recorded.problems == []
    used = {name[0] for name in recorded.operators if isinstance(name, tuple)}
    assert used == {"compute", "load", "memcpy"} | ({"copies"} if pipe.plan.memory.offload else set())


def test_caller_may_use_another_stream(monkeypatch):
    recorded = RecordedStreams()
    train(recorded, monkeypatch, "1f1b", user=recorded.named(("user",), CPU))
    assert recorded.problems == []


@pytest.mark.parametrize(("case", "rows", "devices"), [
    pytest.param("token-weighted", 7, 2, marks=pytest.mark.slow), ("batchnorm with a skip", 8, 3),
])  # fmt: skip
def test_streams_of_three_devices_with_metrics_and_weights(case, rows, devices, monkeypatch):
    recorded = RecordedStreams()
    train(recorded, monkeypatch, "1f1b", case=case, rows=rows, devices=devices)
    assert recorded.problems == []


@pytest.mark.parametrize("ignored", ["compute", "load", "memcpy"])
def test_recorded_streams_detect_a_queue_that_does_not_wait(ignored, monkeypatch):
    recorded = RecordedStreams(ignored)
    train(recorded, monkeypatch, "1f1b")
    assert any(f"('{ignored}'," in problem.split(" on ", 1)[1] for problem in recorded.problems)


def note_reads(recorded, monkeypatch):
    """Note in ``recorded.host_waits`` when the host reads a tensor directly."""
    for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__"):
        usual = getattr(torch.Tensor, name)

        def read(tensor, *args, usual=usual, name=name):
            memory = recorded._memory.get(tensor.untyped_storage()._cdata)
            if memory is not None and memory.made_on is not None:
                recorded.host_waits.append(name)
            return usual(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, read)


def note_issued_steps(recorded, monkeypatch):
    """Note in ``recorded.host_waits`` when all actions of a step were issued."""
    run = Trainer._run

    def noted(*arguments):
        done = run(*arguments)
        recorded.host_waits.append("issued")
        return done

    monkeypatch.setattr(Trainer, "_run", noted)


@pytest.mark.parametrize("case", ["tied gpt with dropout", "batchnorm with a skip", "token-weighted"])
def test_host_issues_a_step_without_waiting_for_the_step_before(case, monkeypatch):
    """The host then waits for the step before, to check its loss, and for a step whose loss or metrics are read."""
    batches = [batch_on(CASES[case], 8, torch.float64, "cpu") for _ in range(3)]
    plain = build(ThreadTeam(2), case, torch.float64, 8, None, 4, **PLANS["1f1b"])
    wanted = [(plain.step(batch), plain.metrics) for batch in batches]
    recorded = RecordedStreams()
    monkeypatch.setitem(streams._KINDS, "cpu", recorded)
    if case == "token-weighted":  # a divisor is read where it is on a CPU, by the type of the device
        monkeypatch.setattr(StageState, "divide_gradients", divided)
    with recorded.using(recorded.current(CPU)):
        pipe = build(ThreadTeam(2), case, torch.float64, 8, None, 4, **PLANS["1f1b"])
        found = [pipe.step(batches[0])]
        note_issued_steps(recorded, monkeypatch)
        note_reads(recorded, monkeypatch)
        for batch in batches[1:]:
            recorded.host_waits.clear()
            found.append(pipe.step(batch))
            assert recorded.host_waits == ["issued", "download", "__bool__"]
        recorded.host_waits.clear()
        metrics = dict(pipe.metrics)
        assert recorded.host_waits[:1] == (["download"] if metrics else [])
        assert [loss.item() for loss in found] == [loss.item() for loss, _ in wanted]
        assert recorded.host_waits[-3:] == ["item"] * 3
    assert metrics == wanted[-1][1]
    assert recorded.problems == []


def divided(state, divisor):
    """`StageState.divide_gradients` as on a GPU."""
    torch._foreach_div_([p.grad for p in state.updated.values()], divisor)


@pytest.mark.parametrize(("mode", "clip"), [("warn", 0.1), (None, None)])
def test_norm_of_a_step_is_read_with_its_loss(mode, clip, monkeypatch):
    recorded = RecordedStreams()
    monkeypatch.setitem(streams._KINDS, "cpu", recorded)
    with recorded.using(recorded.current(CPU)):
        pipe, _ = pipeline_of(CASES[GPT], 8, 4, optimizer=SGD, clip_norm=clip, on_nonfinite=mode)
        batch = batch_on(CASES[GPT], 8, torch.float32, "cpu")
        pipe.step(batch)
        note_issued_steps(recorded, monkeypatch)
        recorded.host_waits.clear()
        pipe.step(batch)
        assert recorded.host_waits == ["issued", *(["download"] * 2 if mode else [])]


def test_links_are_timed_by_the_events_around_messages(monkeypatch):
    monkeypatch.setitem(streams._KINDS, "cpu", RecordedStreams())
    recorded_s = 1e-6  # a copy is one operator
    (link,) = measured_cluster(ThreadTeam(2), {0: CPU, 1: CPU}).links
    assert link.latency_s == pytest.approx(recorded_s)
    found = measure_links(ThreadTeam(2), lambda _: CPU, (), (64, 1 << 16), 2)
    assert all(s == pytest.approx(recorded_s) for times in found.alone.values() for s in times.values())


def test_unused_memory_is_returned_once_to_each_device_with_streams(monkeypatch):
    returned, recorded = [], RecordedStreams()
    monkeypatch.setattr(recorded, "release_unused", returned.append)
    monkeypatch.setitem(streams._KINDS, "meta", recorded)
    streams.release_unused([CPU, torch.device("meta"), CPU, torch.device("meta")])
    assert returned == [torch.device("meta")]


OFFLOADING = [(name, queues) for name in ("1f1b", "split backward", "interleaved", "zb-v", "gpipe", "gis-h")
              for queues in (1, 2)]  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "queues"),
    [pytest.param(*each, marks=[] if each == ("zb-v", 2) else [pytest.mark.slow]) for each in OFFLOADING],
)
def test_every_copy_is_ordered_with_what_reads_and_writes_its_memory(plan, queues, monkeypatch):
    """Five rules keep a copy from reading or writing memory in use.

    1. A copy out waits for what computed the storages.
    2. They are freed when compute is ordered after the copy.
    3. The new ones are allocated by compute's stream.
    4. The copy back waits for its own copy out, and for what used that memory before; its reader waits for it.
    5. A slot of the arena is written again only after the copy back has read it.
    """
    recorded, plain = RecordedStreams(), StreamCopies.__init__

    def divided(self, arena, *others):
        plain(self, arena, *others)
        recorded.divide(arena)

    monkeypatch.setattr(StreamCopies, "__init__", divided)
    operators = captured_once(CASES[GPT], torch.float64, 12, 6)
    away = all_away(even_plan(operators, 2, 6, **PLANS[plan]), operators, queues=queues)
    train(recorded, monkeypatch, plan, rows=12, microbatches=6, given=away).close()
    assert recorded.problems == []
    used = {name[0] for name in recorded.operators if isinstance(name, tuple)}
    assert used == {"compute", "load", "memcpy", "copies", *(["copies back"] if queues == 2 else [])}


def trained_with_graphs(recorded, plan, monkeypatch):
    """Train with captured graphs on recorded streams, which know of each byte of the graphs' memory who uses it."""

    def pool(device):
        found = FakeGraphPool(device)
        recorded.divide(found.arena)
        return found

    monkeypatch.setitem(streams._KINDS, "cpu", recorded)
    monkeypatch.setitem(graph_pool._KINDS, "cpu", pool)
    case = CASES[GPT]
    with recorded.using(recorded.current(CPU)):
        pipe = pipeline_on(ThreadTeam(2), case, 8, 4, SGD, plan_options=PLANS[plan], graphs=True)
        for _ in range(3):
            pipe.step(batch_on(case, 8, torch.float32, "cpu"))
        pipe.close()


@pytest.mark.parametrize(
    "plan", ["interleaved", *(pytest.param(p, marks=pytest.mark.slow) for p in ("1f1b", "split backward", "recompute"))]
)
def test_graphs_reuse_memory_after_the_transfers_that_read_it(plan, monkeypatch):
    recorded = RecordedStreams()
    trained_with_graphs(recorded, plan, monkeypatch)
    assert recorded.problems == []


@pytest.mark.slow
def test_recorded_streams_detect_graphs_that_reuse_memory_of_a_message(monkeypatch):
    """In the capture, messages are freed when they are sent."""
    capture = StepGraphs._capture_one

    def freeing(self, instruction, *given):
        capture(self, instruction, *given)
        if instruction.action.kind in SEND_KINDS:
            instruction.message.tensors = None

    monkeypatch.setattr(StepGraphs, "_capture_one", freeing)
    recorded = RecordedStreams()
    trained_with_graphs(recorded, "1f1b", monkeypatch)
    assert any("writes what is in use on ('memcpy'," in problem for problem in recorded.problems)
