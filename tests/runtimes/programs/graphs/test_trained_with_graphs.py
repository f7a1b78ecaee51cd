"""Training with captured graphs gives the same bits as without: losses, gradients, parameters, buffers, optimizers."""

import pytest
import torch
from panpipe.backends import memcpy
from panpipe.core.capture.graph.storages import StorageMeter, WatchEverything, storage_sizes
from panpipe.core.errors import WorkerError
from panpipe.runtimes.engine.executor import Executor
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.update.training import Training

from ....support.backends.fake_graphs import install
from ....support.cuts import batch_on
from ....support.launch import results
from ....support.models import CASES, PYTHON, Case, TinyGPT, gpt_step
from ....support.parity import OPTIMIZER, PLANS
from ....support.ranks.teams import pipeline_on

GPT, CONV, WEIGHTED = CASES


def batches(case, count=3, rows=8):
    """Batches with other numbers each."""
    first = batch_on(case, rows, torch.float32, "cpu")
    return [{name: value.roll(index, 0) for name, value in first.items()} for index in range(count)]


def tensors_of(pipe):
    """Copies of all that a step changes."""
    found = [*pipe._session.model.parameters(), *pipe._session.model.buffers()]
    found += [parameter.grad for parameter in pipe._session.model.parameters() if parameter.grad is not None]
    for optimizer in pipe.optimizers.values():
        found += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [tensor.detach().clone() for tensor in found]


def compare(train, monkeypatch, case=CASES[GPT], plan="1f1b", microbatches=4, **options):
    """Train with graphs and without; returns the pools of the pipeline with graphs."""
    found = []
    for graphs in (False, True):
        pools = install(monkeypatch)
        team = ThreadTeam(2, memcpy.KIND)
        pipe = pipeline_on(
            team, case, 8, microbatches, OPTIMIZER, plan_options=PLANS[plan], graphs=graphs,
            model=case.model(torch.float32), **options,
        )  # fmt: skip
        returned = train(pipe)
        found.append([*returned, *tensors_of(pipe)])
        pipe.close()
    assert len(found[0]) == len(found[1])
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        assert torch.equal(one, other), number
    assert sum(pool.replays for pool in pools) > 0
    return pools


def steps(case, count=3, rows=8):
    return lambda pipe: [pipe.step(batch).clone() for batch in batches(case, count, rows)]


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        (GPT, "1f1b"),
        (GPT, "split backward"),
        (CONV, "recompute in a v"),
        (WEIGHTED, "interleaved"),
        *(
            pytest.param(name, plan, marks=pytest.mark.slow)
            for name in CASES
            for plan in ("gpipe", "zb-v", "v-half", "recompute", "looped", "zb-2p")
        ),
    ],
)
def test_bits_are_equal(name, plan, monkeypatch):
    pools = compare(steps(CASES[name]), monkeypatch, CASES[name], plan)
    assert len(pools) == 2
    assert all(pool.replays == 3 * pool.captures > 0 for pool in pools)


@pytest.mark.filterwarnings("ignore")
def test_devices_with_a_stage_of_python_are_left_out(monkeypatch):
    compare(steps(PYTHON), monkeypatch, PYTHON, "interleaved")


def test_gradients_accumulate_over_batches(monkeypatch):
    def train(pipe):
        losses = []
        for index, batch in enumerate(batches(CASES[GPT], 7)):
            losses.append(pipe.step(batch, update=index % 3 == 2 or index > 4).clone())
        return losses

    pools = compare(train, monkeypatch)
    actions = 2 * 4
    assert [pool.captures for pool in pools] == [2 * actions] * 2  # for the first batch of an update and for the others


def test_gradients_are_left_to_the_caller_without_an_optimizer(monkeypatch):
    def train(pipe):
        found = []
        for batch in batches(CASES[GPT]):
            found.append(pipe.step(batch).clone())
            found += [parameter.grad.clone() for parameter in pipe._session.model.parameters()]
            with torch.no_grad():
                for parameter in pipe._session.model.parameters():
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
        return found

    found = []
    for graphs in (False, True):
        install(monkeypatch)
        pipe = pipeline_on(ThreadTeam(2, memcpy.KIND), CASES[GPT], 8, 4, None, graphs=graphs)
        found.append(train(pipe))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:microbatches of a new shape")
def test_a_smaller_last_batch_has_graphs_of_its_own(monkeypatch):
    def train(pipe):
        big, small = batches(CASES[CONV], 2), batches(CASES[CONV], 2, 7)
        return [pipe.step(batch).clone() for batch in (big[0], small[0], big[1], small[1], big[0])]

    pools = compare(train, monkeypatch, CASES[CONV])
    assert all(pool.captures == 2 * 8 for pool in pools)


def test_evaluation_between_steps(monkeypatch):
    def train(pipe):
        found = []
        for batch in batches(CASES[CONV]):
            found += [pipe.step(batch).clone(), pipe.evaluate(batch).clone()]
        return found

    compare(train, monkeypatch, CASES[CONV])


def test_checkpoint_is_loaded_in_place(monkeypatch, tmp_path):
    def train(pipe):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        one, two, three = batches(CASES[GPT])
        found = [pipe.step(one).clone()]
        pipe.checkpoint(folder)
        found.append(pipe.step(two).clone())
        pipe.resume(folder)
        return [*found, pipe.step(two).clone(), pipe.step(three).clone()]

    pools = compare(train, monkeypatch)
    assert all(pool.captures == 8 for pool in pools)


def test_parameters_whose_memory_moved_are_captured_again(monkeypatch):
    def train(pipe):
        one, two, three = batches(CASES[GPT])
        found = [pipe.step(one).clone()]
        for parameter in pipe._session.model.parameters():
            parameter.data = parameter.data * 0.5
        return [*found, pipe.step(two).clone(), pipe.step(three).clone()]

    pools = compare(train, monkeypatch)
    assert all(pool.captures == 16 for pool in pools)


def test_trace_has_the_saved_tensors(monkeypatch):
    case, peaks = CASES["token-weighted"], []  # of two layers: no two stages of a device save one tensor

    def train(pipe):
        one, two, three = batches(case)
        loss = pipe.step(one).clone()
        other, trace = pipe.trace_step(two)
        found = {device: [each.bytes for each in trace.memory if each.device == device] for device in (0, 1)}
        peaks.append({device: (max(sizes), sizes[-1]) for device, sizes in found.items()})
        return [loss, other.clone(), pipe.step(three).clone()]

    for plan in ("split backward", "recompute in a v"):
        compare(train, monkeypatch, case, plan)
        with_graphs, without = peaks.pop(), peaks.pop()
        assert with_graphs == without
        assert all(last == 0 < peak for peak, last in with_graphs.values())


@pytest.mark.slow
def test_replicas_have_the_same_bits_over_the_slots_of_nccl(tmp_path):
    for found in results("graphs", tmp_path, 4, MESH="pp=2,dp=2"):
        assert tuple(found) == ("none", "optimizer")
        for shard, equal in found.items():
            assert len(equal) > 4, shard
            assert all(equal), shard


def larger_gpt(dtype):
    torch.manual_seed(0)
    return TinyGPT(layers=4, width=64).to(dtype)


LARGER = Case(larger_gpt, gpt_step, CASES[GPT].batch)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["1f1b", "interleaved"])
def test_memory_of_the_graphs_is_near_what_a_step_allocates(plan, monkeypatch):
    """Without parameters, buffers and gradients, at the peak of each device."""
    run, peaks = Executor._run_in_order, {}

    def watched(self, instructions, events):
        states = self.update.states.values()
        held = [t for s in states for t in (*s.parameters.values(), *s.buffers.values(), *s.gradient_buffers)]
        meter = StorageMeter()
        with WatchEverything(meter, storage_sizes(held)):
            run(self, instructions, events)
        peaks[self.device] = max(meter.peak, peaks.get(self.device, 0))

    batch = LARGER.batch(16, torch.float32)
    options = {"plan_options": PLANS[plan]}
    plain = pipeline_on(ThreadTeam(2, memcpy.KIND), LARGER, 16, 8, torch.optim.SGD, **options)
    monkeypatch.setattr(Executor, "_run_in_order", watched)
    plain.step(batch)
    monkeypatch.setattr(Executor, "_run_in_order", run)
    pools = install(monkeypatch)
    graphed = pipeline_on(ThreadTeam(2, memcpy.KIND), LARGER, 16, 8, torch.optim.SGD, graphs=True, **options)
    graphed.step(batch)
    for wanted, found in zip(sorted(peaks.values()), sorted(pool.peak for pool in pools), strict=True):
        assert wanted * 0.9 < found < wanted * 1.2


def test_frozen_and_trained_parameters_between_steps(monkeypatch):
    def train(pipe):
        weight = pipe._session.model.blocks[0].up.weight
        found = []
        for batch, trained in zip(batches(CASES[GPT], 4), (True, False, True, True), strict=True):
            weight.requires_grad_(trained)
            found.append(pipe.step(batch).clone())
        return found

    compare(train, monkeypatch)


def test_step_after_one_that_failed_is_captured_again(monkeypatch):
    def train(pipe):
        one, two, three = batches(CASES[CONV])
        found = [pipe.step(one).clone()]
        with pytest.raises((IndexError, WorkerError)):
            pipe.step({**two, "y": two["y"] + 100})
        return [*found, pipe.step(three).clone()]

    compare(train, monkeypatch, CASES[CONV])


def test_scaled_losses(monkeypatch):
    def train(pipe):
        return [pipe.step(batch).clone() for batch in batches(CASES[WEIGHTED])]

    found = []
    for graphs in (False, True):
        install(monkeypatch)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        training = Training(scaler=scaler, clip_norm=0.1)
        pipe = pipeline_on(
            ThreadTeam(2, memcpy.KIND), CASES[WEIGHTED], 8, 4, OPTIMIZER, training=training, graphs=graphs
        )
        found.append([*train(pipe), torch.tensor(scaler.get_scale()), *tensors_of(pipe)])
    assert found[0][3] == 4.0 * 2**3
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
