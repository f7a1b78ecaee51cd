"""A stage of a cut graph: what its F returns and its B computes, against autograd of the whole."""

import torch
from panpipe.core.capture.graph.randomness import random_key
from panpipe.runtimes.torch_compile.graph_stage import GraphStage, StagePass, dense

from ...support.stages.cut_graphs import ROWS, WIDTH, cut_graph, inputs, whole

KEY = random_key(0, 0, 0)


def forward(graph, arguments, gradients=True):
    """The stages of both microbatches after F, their passes, and the results."""
    shared = [StagePass(), StagePass()]
    stages, results = [], []
    for m in range(2):
        leaves = (arguments[0][2 * m : 2 * m + 2].detach().requires_grad_(), *arguments[1:])
        own = [GraphStage(graph, number, m, gradients, shared[number]) for number in range(2)]
        outputs, none = own[0].forward(m, [], leaves, KEY)
        assert not none
        last, (result,) = own[1].forward(m, [value.clone() for value in outputs], leaves, KEY)
        assert not last
        stages.append((own, leaves))
        results.append(result)
    return stages, shared, torch.cat(results)


def test_forwards_compute_the_whole_and_return_detached_tensors():
    arguments = inputs()
    _, _, result = forward(cut_graph(arguments), arguments)
    torch.testing.assert_close(result, whole(*arguments).detach())
    assert not result.requires_grad


def test_backwards_compute_the_gradients_of_autograd():
    arguments = inputs()
    graph = cut_graph(arguments)
    stages, shared, _ = forward(graph, arguments)
    wanted = torch.randn(ROWS, WIDTH)
    expected = torch.autograd.grad(whole(*arguments), arguments, wanted)
    for one in shared:
        one.wanted = {graph.outputs[0]: wanted}
    for m, ((first, second), leaves) in enumerate(stages):
        ((sent,),) = second.backward(m, {}, torch.ones(()), leaves, KEY)
        first.backward(m, {0: sent}, torch.ones(()), leaves, KEY)
    found = shared[0].gradients | shared[1].gradients
    torch.testing.assert_close(torch.cat(found[0]), expected[0])  # of each microbatch
    torch.testing.assert_close(found[1], [expected[1]])  # their sum
    torch.testing.assert_close(found[2], [expected[2]])


def test_argument_that_is_not_cut_is_one_leaf_for_all_microbatches():
    arguments = inputs()
    _, shared, _ = forward(cut_graph(arguments), arguments)
    assert set(shared[0].arguments) == {1}
    assert shared[0].arguments[1].data_ptr() == arguments[1].data_ptr()
    assert shared[0].arguments[1] is not arguments[1]


def test_output_without_a_gradient_gives_zeros_to_earlier_stages():
    arguments = inputs()
    graph = cut_graph(arguments)
    stages, shared, _ = forward(graph, arguments)
    (_, second), leaves = stages[0]
    ((sent,),) = second.backward(0, {}, torch.ones(()), leaves, KEY)
    assert sent.tolist() == torch.zeros(2, WIDTH).tolist()
    assert shared[1].gradients == {2: [None]}


def test_forward_alone_keeps_nothing():
    arguments = inputs()
    stages, _, result = forward(cut_graph(arguments), arguments, gradients=False)
    torch.testing.assert_close(result, whole(*arguments).detach())
    assert all(stage._forward_result is None for own, _ in stages for stage in own)


def test_gradients_of_microbatches_are_listed_or_summed():
    found = StagePass()
    for value in (None, 1.0, 2.0, None):
        gradient = None if value is None else torch.tensor([value])
        found.add(0, gradient, cut=True)
        found.add(1, gradient, cut=False)
    assert [None if g is None else g.item() for g in found.gradients[0]] == [None, 1.0, 2.0, None]
    assert [g.item() for g in found.gradients[1]] == [3.0]


def test_gradient_that_is_missing_is_zero():
    like = torch.ones(2)
    assert dense(None, like).tolist() == [0.0, 0.0]
    assert dense(like, like) is like
