"""Writing a checkpoint by several processes: who writes what, and what a failure leaves."""

import threading

import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.checkpoint.state_parts import Parts
from panpipe.runtimes.checkpoint.writing import Save, begin_save
from panpipe.runtimes.launch.team import Exchange


class Threads:
    """Exchanges between threads, each in the place of a process."""

    def __init__(self, count):
        self.count, self._values, self._barrier = count, [None] * count, threading.Barrier(count, timeout=20)

    def exchange(self, number):
        def gather(value):
            self._values[number] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return Exchange(number, self.count, gather)

    def run(self, work):
        """The error of each process, or None."""
        errors = [None] * self.count

        def body(number):
            try:
                work(number, self.exchange(number))
            except RequestError as error:
                errors[number] = str(error)

        threads = [threading.Thread(target=body, args=(number,)) for number in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors


def parts(**tensors):
    held = {f"model.{name}": torch.full((2,), value) for name, value in tensors.items()}
    return Parts(held, {"progress.steps": 7})


def save(path, own, keep=None, writers=2):
    hidden = begin_save(path)
    return Threads(len(own)).run(
        lambda number, exchange: Save(path, hidden, own[number], 7, keep, writers).run(exchange)
    )


def test_process_that_cannot_write_fails_all_with_its_message_and_leaves_nothing(tmp_path):
    path = tmp_path / "step-7"
    bad = Parts({}, {"progress.x": object()})
    first, second = save(path, [parts(a=1.0), bad])
    assert first == second
    assert "a checkpoint can store only plain data" in first
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_not_in_one_folder_are_noticed(tmp_path):
    path = tmp_path / "step-7"
    hidden = begin_save(path)

    def work(number, exchange):
        own = path if number == 0 else tmp_path / "elsewhere" / "step-7"
        if number == 1:
            (own.parent / hidden).mkdir(parents=True)
        Save(own, hidden, parts(**{f"p{number}": 1.0}), 7, None, 2).run(exchange)

    first, second = Threads(2).run(work)
    assert first == second
    assert "it is not one folder on all ranks" in first
    assert not path.exists()
