"""A device's queue: operations in order, each when its inputs are there."""

import simpy
from panpipe.simulators.device import DeviceQueue


def queue(*seconds):
    environment = simpy.Environment()
    return environment, DeviceQueue(environment, seconds)


def at(environment, time, call):
    def process():
        yield environment.timeout(time)
        call()

    environment.process(process())


def test_operations_run_one_after_another():
    environment, device = queue(1.0, 0.0, 2.5)
    device.begin()
    assert not device.done
    environment.run()
    assert (device.starts, device.ends, device.done) == ([0.0, 1.0, 1.0], [1.0, 1.0, 3.5], True)


def test_operation_waits_for_all_of_its_inputs():
    environment, device = queue(1.0, 1.0)
    device.pending[:] = [0, 2]
    device.begin()
    for time in (0.5, 4.0):
        at(environment, time, lambda: device.arrived(1))
    environment.run()
    assert device.starts == [0.0, 4.0]


def test_input_that_arrives_early_starts_nothing_before_its_turn():
    environment, device = queue(3.0, 1.0)
    device.pending[:] = [0, 1]
    device.begin()
    at(environment, 1.0, lambda: device.arrived(1))
    environment.run()
    assert device.starts == [0.0, 3.0]


def test_other_work_is_issued_between_operations_and_after_the_last():
    environment, device = queue(1.0, 2.0)
    issued = []
    for position in range(3):
        device.between[position].append(lambda position=position: issued.append((position, environment.now)))
    device.pending[1] = 1
    device.begin()
    at(environment, 5.0, lambda: device.arrived(1))
    environment.run()
    assert issued == [(0, 0.0), (1, 1.0), (2, 7.0)]  # issued, although the operation still waits


def test_device_without_operations_is_done_and_issues_its_work():
    _, device = queue()
    issued = []
    device.between[0].append(lambda: issued.append(True))
    device.begin()
    assert (device.done, issued) == (True, [True])
    device.close()
    assert device.between == []
