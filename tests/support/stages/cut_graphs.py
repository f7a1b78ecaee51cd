"""A small function of a batch and two weights, as a graph cut into two stages."""

import torch
from panpipe.runtimes.torch_compile.cut_graph import CutGraph
from panpipe.runtimes.torch_compile.cutting import cut
from panpipe.runtimes.torch_compile.node_info import node_info, tensors_of
from torch import fx

ROWS, WIDTH = 4, 3


def whole(x, w, v):
    return ((x @ w).tanh() @ v).tanh()


def cut_graph(arguments, rows=2):
    graph = fx.symbolic_trace(whole)
    info = node_info(graph, arguments, {0: (rows, WIDTH)})
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    stages = cut(graph, info, 2)
    sizes = [rows] * (ROWS // rows)
    return CutGraph(stages, sizes, {rows: info}, frozenset({0}), tensors_of(output), False)


def inputs():
    torch.manual_seed(0)
    x, w, v = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    return x.requires_grad_(), w.requires_grad_(), v.requires_grad_()
