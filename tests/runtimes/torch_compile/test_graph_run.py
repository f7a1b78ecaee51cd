"""A pass of a cut graph on threads: its outputs and gradients are those of the whole, and devices are used again."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.torch_compile.graph_run import DevicePool, Pass

from ...support.stages.cut_graphs import cut_graph, inputs, whole


def both(pool, arguments, gradient):
    """The outputs and gradients of one pass."""
    one = Pass(pool, arguments, True)
    (output,) = one.forward()
    return output, one.backward([gradient])


def test_pass_has_the_outputs_and_gradients_of_the_whole():
    arguments, gradient = inputs(), torch.randn(4, 3)
    output, found = both(DevicePool(cut_graph(arguments)), arguments, gradient)
    torch.testing.assert_close(output, whole(*arguments).detach())
    assert not output.requires_grad
    wanted = torch.autograd.grad(whole(*arguments), arguments, gradient)
    torch.testing.assert_close(found, list(wanted))


def test_argument_without_a_gradient_gets_none():
    x, w, v = inputs()
    arguments = x.detach(), w, v
    _, found = both(DevicePool(cut_graph(arguments)), arguments, torch.ones(4, 3))
    assert found[0] is None
    assert found[1] is not None


def test_output_without_a_gradient_gives_none_to_all():
    arguments = inputs()
    one = Pass(DevicePool(cut_graph(arguments)), arguments, True)
    one.forward()
    assert all(each is None or not each.any() for each in one.backward([None]))


def test_devices_of_an_ended_pass_are_used_by_the_next_and_not_by_one_at_the_same_time():
    arguments = inputs()
    pool = DevicePool(cut_graph(arguments))
    first, second = (Pass(pool, arguments, True) for _ in range(2))
    outputs = [first.forward()[0], second.forward()[0]]
    used = first._devices, second._devices
    assert used[0] is not used[1]
    assert torch.equal(*outputs)
    # In the other order, with other gradients: each has its own saved tensors.
    ones, twos = second.backward([torch.ones(4, 3)]), first.backward([torch.full((4, 3), 2.0)])
    torch.testing.assert_close([2 * one for one in ones], twos)
    third = Pass(pool, arguments, True)
    third.forward()
    assert third._devices in used
    assert all(not shared.gradients for shared in used[0].shared if third._devices is not used[0])


def test_pass_without_gradients_keeps_no_devices_and_has_no_backward():
    arguments = inputs()
    pool = DevicePool(cut_graph(arguments))
    one = Pass(pool, arguments, False)
    torch.testing.assert_close(one.forward()[0], whole(*arguments).detach())
    assert one._devices is None
    assert len(pool._idle[False]) == 1
    with pytest.raises(RequestError, match="backward is called a second time, but panpipe has freed the saved tensors"):
        one.backward([torch.ones(4, 3)])


def test_second_backward_is_refused():
    arguments = inputs()
    one = Pass(DevicePool(cut_graph(arguments)), arguments, True)
    one.forward()
    one.backward([torch.ones(4, 3)])
    with pytest.raises(RequestError, match="backward is called a second time"):
        one.backward([torch.ones(4, 3)])


def test_threads_have_the_callers_autocast():
    arguments = inputs()
    one = Pass(DevicePool(cut_graph(arguments)), arguments, False)
    with torch.autocast("cpu", torch.bfloat16):
        output, wanted = one.forward()[0], whole(*arguments)
    assert output.dtype is wanted.dtype is torch.bfloat16
    assert torch.equal(output, wanted)
