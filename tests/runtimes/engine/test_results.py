"""The results of one batch over two devices: numbers, where they come from, and means."""

import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from panpipe.backends.memcpy import connect
from panpipe.runtimes.batch.losses import mean_loss
from panpipe.runtimes.devices.compute import HostQueue
from panpipe.runtimes.engine.result_parts import Computed
from panpipe.runtimes.engine.results import BatchResults, weight_of

PIECES = [SimpleNamespace(weight=0.75, samples=3), SimpleNamespace(weight=0.25, samples=1)]
LOSS, METRIC, SHOWN = Computed("loss", 1), Computed("accuracy", 1), Computed("shown", 0)
BY_SHARE = [[LOSS, None, METRIC, SHOWN]] * 2
"""Of both microbatches; the step returns no weight."""
NUMBERS = {
    0: {("shown", 0): torch.tensor(0.1), ("shown", 1): torch.tensor(0.2)},
    1: {
        ("loss", 0): torch.tensor(1.0), ("loss", 1): torch.tensor(3.0),
        ("accuracy", 0): torch.tensor([1.0, 0.0]), ("accuracy", 1): torch.tensor([1.0, 1.0]),
    },
}  # fmt: skip
"""Device → what its stages compute for each microbatch."""


class Agreement:
    def __init__(self):
        self.calls = []

    def start_exchange(self):
        self.calls.append("start_exchange")

    def collect(self):
        self.calls.append("collect")

    def differ(self):
        return False

    def note_replica(self, apart):
        self.calls.append(("replica", apart()))


def prepared(parts, weighted=False, weight_dtype=None):
    outputs = SimpleNamespace()
    compiled = SimpleNamespace(operators=SimpleNamespace(step=SimpleNamespace(outputs=outputs)))
    return SimpleNamespace(
        parts=parts, compiled=[compiled] * len(parts), weighted=weighted, weight_dtype=weight_dtype,
        loss_dtype=torch.float32, metrics=["accuracy"],
    )  # fmt: skip


def collected(step, numbers=NUMBERS, replicas=None, agreement=None, count=1, queue=HostQueue, pieces=PIECES):
    """The results on each of two devices, after both have collected them."""
    ends = connect(2)

    def work(end):
        team = SimpleNamespace(
            backend=lambda device: end, replicas_of=lambda device: replicas and replicas[device], replicas=count,
            local=(end.device,), tensor=None, replica=0,
        )  # fmt: skip
        workers = SimpleNamespace(queues={end.device: queue()})
        results = BatchResults(step, pieces, 2, team, workers, agreement or Agreement())
        results.start_exchange(end.device, SimpleNamespace(results=numbers[end.device]))
        weight = results.total_weight(end.device)
        results.collect(end.device)
        return results, weight

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, ends))


def test_every_device_has_the_numbers_of_all_with_their_bits():
    tiny = torch.tensor(0.1)  # no sum of others may round it
    (first, weight), (second, _) = collected(prepared(BY_SHARE))
    assert first.own == second.own
    assert [row[:3] for row in first.own] == [[1.0, 0.75, 0.5], [3.0, 0.25, 1.0]]
    assert first.own[0][3] == tiny.double().item()
    assert weight == 1.0


def test_loss_and_metrics_are_means_by_share_in_their_dtype():
    (results, _), _ = collected(prepared(BY_SHARE))
    loss, metrics = results.loss(), results.metrics()()
    assert loss.item() == 1.0 * 0.75 + 3.0 * 0.25
    assert loss.dtype is torch.float32
    assert metrics == {"accuracy": 0.5 * 0.75 + 1.0 * 0.25}
    assert results.rows is None
    assert results.loss_is_finite(0)


def test_weights_that_the_step_returns_are_divided_by():
    weights = {**NUMBERS[1], ("weight", 0): torch.tensor(5.0), ("weight", 1): torch.tensor(15.0)}
    parts = [[LOSS, Computed("weight", 1), METRIC, SHOWN]] * 2
    step = prepared(parts, weighted=True, weight_dtype=torch.float32)
    for results, weight in collected(step, {**NUMBERS, 1: weights}):
        assert (weight.item(), weight.dtype) == (20.0, torch.float32)
        loss, metrics = results.loss(), results.metrics()()
        assert loss.item() == (1.0 * 5 + 3.0 * 15) / 20
        assert metrics["accuracy"] == (0.5 * 5 + 1.0 * 15) / 20


def test_loss_and_metrics_of_weights_that_are_all_zero_are_nan():
    weights = {**NUMBERS[1], ("weight", 0): torch.tensor(0.0), ("weight", 1): torch.tensor(0.0)}
    step = prepared([[LOSS, Computed("weight", 1), METRIC, SHOWN]] * 2, weighted=True, weight_dtype=torch.float32)
    for results, _ in collected(step, {**NUMBERS, 1: weights}):
        assert results.loss().isnan()
        assert math.isnan(results.metrics()()["accuracy"])


def test_constants_of_the_step_are_the_same_on_all_devices_without_an_exchange():
    for results, _ in collected(prepared([[0.5, None, 2.0], [1.5, None, 4.0]])):
        assert results.own == [[0.5, 0.75, 2.0], [1.5, 0.25, 4.0]]


def test_loss_that_is_not_finite_is_found_on_every_device():
    bad = {**NUMBERS[1], ("loss", 1): torch.tensor(float("inf"))}
    for device, (results, _) in enumerate(collected(prepared(BY_SHARE), {**NUMBERS, 1: bad})):
        assert not results.loss_is_finite(device)


def test_batch_is_compared_between_ranks_once_although_it_is_collected_again():
    agreement = Agreement()
    (results, _), _ = collected(prepared(BY_SHARE), agreement=agreement)
    results.collect(0)
    assert sorted(agreement.calls) == ["collect", "collect", "start_exchange", "start_exchange"]  # of two devices


def test_replicas_with_other_numbers_of_samples_count_by_samples():
    """Two replicas of the same numbers: microbatches of 3 and 1 samples in each."""
    assert [weight_of(piece, 1) for piece in PIECES] == [0.75, 0.25]
    assert [weight_of(piece, 2) for piece in PIECES] == [3.0, 1.0]
    pairs = {device: connect(2) for device in range(2)}
    step, agreements = prepared(BY_SHARE), [Agreement(), Agreement()]

    def replica(number):
        own = {device: ends[number] for device, ends in pairs.items()}
        numbers = NUMBERS if number == 0 else {**NUMBERS, 1: {**NUMBERS[1], ("loss", 0): torch.tensor(5.0)}}
        return [each for each, _ in collected(step, numbers, own, agreements[number], 2)]

    with ThreadPoolExecutor(2) as pool:
        found = [results for each in pool.map(replica, range(2)) for results in each]
    for results in found:
        loss, metrics = results.loss(), results.metrics()()
        assert loss.item() == pytest.approx((3 * 1.0 + 3.0 + 3 * 5.0 + 3.0) / 8)
        assert metrics["accuracy"] == pytest.approx(0.625)
    assert [row[0] for row in found[2].own] == [5.0, 3.0]  # of this replica alone
    assert ("replica", None) in agreements[0].calls


class DeviceQueue(HostQueue):
    """A queue whose reads are counted."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def start_read(self, tensor):
        def read():
            self.reads += 1
            return tensor.clone()

        return read


def test_numbers_are_read_once_when_they_are_asked_for():
    queues = []

    def queue():
        queues.append(DeviceQueue())
        return queues[-1]

    for results, _ in collected(prepared(BY_SHARE), queue=queue):
        metrics, loss = results.metrics(), results.loss()
        assert [each.reads for each in queues].count(0) >= 1
        before = sum(each.reads for each in queues)
        assert loss.item() == 1.5
        assert metrics() == metrics() == {"accuracy": 0.625}
        assert len(results.own) == 2
        assert sum(each.reads for each in queues) == before + 1


@pytest.mark.parametrize("weights", ["shares", "constants", "computed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_loss_of_replicas_has_the_bits_of_that_which_the_host_computes(weights, dtype):
    losses = [[0.1, 0.7], [1.3]]
    counts = [[5.0, 3.0], [7.0]]
    parts = {"shares": None, "constants": 0.3, "computed": Computed("weight", 1)}
    pairs = {device: connect(2) for device in range(2)}

    def replica(number):
        own = {device: ends[number] for device, ends in pairs.items()}
        named = {("loss", m): torch.tensor(x, dtype=dtype) for m, x in enumerate(losses[number])}
        named |= {("weight", m): torch.tensor(x) for m, x in enumerate(counts[number])}
        step = prepared([[LOSS, parts[weights]]] * len(losses[number]), weights != "shares")
        step.weight_dtype = torch.float32 if weights == "computed" else None
        step.loss_dtype, step.metrics = dtype, []
        pieces = PIECES[: len(losses[number])]
        return [each.loss() for each, _ in collected(step, {0: {}, 1: named}, own, None, 2, pieces=pieces)]

    with ThreadPoolExecutor(2) as pool:
        found = [loss for each in pool.map(replica, range(2)) for loss in each]
    of_host = [torch.tensor(x, dtype=dtype) for x in (0.1, 0.7, 1.3)]
    by = {
        "shares": [3 / 7, 1 / 7, 3 / 7],
        "constants": [0.3] * 3,
        "computed": [torch.tensor(x) for x in (5.0, 3.0, 7.0)],
    }
    wanted = mean_loss(of_host, by[weights], weights != "shares")[0]
    assert [(loss.item(), loss.dtype) for loss in found] == [(wanted.item(), wanted.dtype)] * 4
