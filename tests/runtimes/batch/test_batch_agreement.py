"""Comparison of batches between ranks, with the tables of two ranks added up by hand."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.batch import batch_agreement
from panpipe.runtimes.batch.batch_agreement import BatchAgreement, ChangedValues
from panpipe.runtimes.batch.fingerprint import fingerprint
from panpipe.runtimes.batch.microbatches import split_batch
from panpipe.runtimes.devices.compute import HostQueue
from panpipe.runtimes.watch.activity import Activity


class Rank:
    """One of two ranks, whose table waits for the other one's."""

    size, replica, replicas, tensor, batch_devices = 2, 0, 1, None, range(2)

    def __init__(self, number):
        self.local, self.failure, self.activities = (number,), None, {number: Activity(method="step 1")}

    def sum_over_processes(self, table):
        self.table = table
        return self

    def wait(self):
        self.waited = True

    def collectively(self, work):
        return work()

    def fail(self, failure):
        self.failure = failure

    def rank(self, number):
        return number


def batch(rows=4, **changes):
    return {"x": torch.arange(2.0 * rows).view(rows, 2), "y": torch.arange(rows), "name": "words"} | changes


def compared(first, second, known=(True, True), changes=(None, None)):
    """What both ranks find of their batches."""
    ranks = [Rank(number) for number in range(2)]
    found = [
        BatchAgreement(rank, {number: HostQueue()}, split_batch(given, 2), ready, change)
        for number, (rank, given, ready, change) in enumerate(zip(ranks, (first, second), known, changes, strict=True))
    ]
    total = ranks[0].table + ranks[1].table
    for rank in ranks:
        rank.table.copy_(total)
    return ranks, found


def refusals(found, **given):
    said = []
    for agreement in found:
        agreement.collect()
        with pytest.raises(RequestError) as error:
            agreement.refuse("no parameter was updated")
        said.append(str(error.value))
    assert said[0] == said[1]
    return said[0]


def test_equal_batches_are_accepted_on_all_ranks():
    _, found = compared(batch(), batch())
    for agreement in found:
        assert not agreement.differ()
        agreement.refuse("")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (batch(6), "rank 1 has a batch of 6 samples and rank 0 one of 4"),
        (batch(y=torch.arange(4).flip(0)), r"rank 1 has other values in batch['y'] than rank 0"),
        (batch(x=torch.zeros(4, 3)), r"rank 1 has another shape, dtype or value of batch['x'] than rank 0"),
        (batch(name="other"), r"rank 1 has another shape, dtype or value of batch['name'] than rank 0"),
        (batch(z=torch.arange(4)), "rank 1 has a batch with other leaves than rank 0"),
    ],
)
def test_first_difference_is_refused_by_name_on_all_ranks(other, said):
    _, found = compared(batch(), other)
    refusal = refusals(found)
    assert refusal.startswith(f"{said}: the ranks of a pipeline compute parts of one batch")
    assert refusal.endswith("; no parameter was updated")


def test_one_bit_of_one_value_counts():
    other = batch()
    other["x"][-1, -1] = torch.nextafter(other["x"][-1, -1], torch.tensor(99.0))
    _, found = compared(batch(), other)
    assert all(agreement.differ() for agreement in found)


def test_rank_that_waits_is_no_difference():
    ranks, found = compared(batch(), batch(), known=(True, False))
    for agreement in found:
        agreement.refuse_before_run()
    assert [rank.failure for rank in ranks] == [None, None]


def test_ranks_that_run_already_learn_of_a_refusal_before_the_step():
    ranks, found = compared(batch(), batch(6), known=(True, False))
    with pytest.raises(RequestError, match="a batch of 6 samples") as error:
        found[1].refuse_before_run()
    assert ranks[1].failure is error.value
    ranks, found = compared(batch(), batch(6), known=(False, False))
    with pytest.raises(RequestError, match="a batch of 6 samples"):
        found[1].refuse_before_run()
    assert ranks[1].failure is None  # all of them are here


def test_values_that_changed_differently_are_refused_with_what_changed_here():
    _, found = compared(batch(), batch(), changes=(None, ChangedValues(7, "a.py:3: 'rate' was 0.1 and is 0.2")))
    with pytest.raises(RequestError, match="on rank 1 than on rank 0: on rank 0 nothing changed"):
        found[0].refuse_before_run()
    with pytest.raises(RequestError, match=r"on rank 1 a\.py:3: 'rate' was 0\.1 and is 0\.2"):
        found[1].refuse_before_run()
    same = ChangedValues(7, "rate")
    for agreement in compared(batch(), batch(), changes=(same, same))[1]:
        agreement.refuse_before_run()


def test_another_replica_whose_ranks_differ_is_named():
    _, found = compared(batch(), batch())
    found[0].collect()
    found[0].note_replica(lambda: 3)
    with pytest.raises(RequestError, match=r"the ranks of replica 3 were given different batches.*; done"):
        found[0].refuse("done")


class Ahead(HostQueue):
    """A queue whose host runs ahead, and which counts reads."""

    runs_ahead = True

    def __init__(self):
        super().__init__()
        self.reads = 0

    def start_read(self, tensor):
        def read():
            self.reads += 1
            return tensor

        return read


class GpuRank(Rank):
    """A rank whose table is summed after the last backward."""

    def backend(self, device):
        return self

    def all_reduce(self, table):
        return self.sum_over_processes(table)


def ahead(first, second):
    """Two ranks whose hosts run ahead, with their batches; the processes have exchanged their tables."""
    ranks, queues = [GpuRank(number) for number in range(2)], [Ahead(), Ahead()]
    found = [
        BatchAgreement(rank, {number: queue}, split_batch(given, 2), True)
        for number, (rank, queue, given) in enumerate(zip(ranks, queues, (first, second), strict=True))
    ]
    exchange(ranks)
    return ranks, queues, found


def exchange(ranks):
    total = ranks[0].table + ranks[1].table
    for rank in ranks:
        rank.table.copy_(total)


@pytest.mark.parametrize("other", [batch(6), batch(x=torch.ones(4, 2))])
def test_batches_on_the_host_are_compared_before_the_update_of_a_gpu(other):
    _, queues, found = ahead(batch(), other)
    for agreement in found:
        agreement.start_exchange()
        agreement.collect()
        assert agreement.differ()
        assert not agreement.waits
    assert "rank 1 has" in refusals(found)
    assert [queue.reads for queue in queues] == [0, 0]


def on_gpu_if_ones(tensor):
    return bool(tensor == fingerprint([torch.ones(4, 2)]))


@pytest.mark.parametrize("first", [batch(), batch(x=torch.ones(4, 2))])
def test_values_on_a_gpu_are_read_by_the_host_when_the_batch_is_refused_and_not_before(first, monkeypatch):
    monkeypatch.setattr(batch_agreement, "is_on_gpu", on_gpu_if_ones)
    ranks, queues, found = ahead(first, batch(x=torch.ones(4, 2)))
    for agreement in found:
        agreement.start_exchange()
    exchange(ranks)
    for agreement in found:
        agreement.collect()
        assert not agreement.differ()  # as far as it is known
        assert agreement.waits
    assert [queue.reads for queue in queues] == [0, 0]
    if first["x"][0, 0] == 1:
        for agreement in found:
            agreement.refuse("")
    else:
        assert "rank 1 has other values in batch['x'] than rank 0" in refusals(found)
    assert [queue.reads for queue in queues] == [1, 1]
    assert not any(agreement.waits for agreement in found)


def test_samples_differ_before_the_values_on_a_gpu_are_known(monkeypatch):
    monkeypatch.setattr(batch_agreement, "is_on_gpu", lambda tensor: True)
    ranks, queues, found = ahead(batch(), batch(6))
    for agreement in found:
        agreement.start_exchange()
    exchange(ranks)
    for agreement in found:
        assert agreement.differ()
    assert [queue.reads for queue in queues] == [0, 0]


def test_devices_of_one_process_compare_nothing():
    class Threads(Rank):
        local, size = (0, 1), 2

        def __init__(self):
            pass

    agreement = BatchAgreement(Threads(), {0: HostQueue()}, split_batch(batch(), 2), False, ChangedValues(7, "rate"))
    agreement.refuse_before_run()
    assert not agreement.differ()
    agreement.refuse("")
