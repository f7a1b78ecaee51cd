"""A closed pipeline that nobody holds is freed, with the user's model, and leaves nothing in torch."""

import gc
import linecache
import weakref

import panpipe
import torch
from torch import nn
from torch.fx.graph_module import _loader


class Doubled(torch.autograd.Function):
    """A function whose backward is the user's."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor.value

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor.value, None


class Factor:
    """What the function is given in addition to tensors."""

    value = 2.0


class Choosing(nn.Module):
    """A module that needs the value of a tensor, so that it stays Python."""

    def forward(self, x):
        return x.relu() if x.sum().item() > 0 else x.neg()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.choosing, self.last = nn.Linear(4, 4), Choosing(), nn.Linear(4, 1)

    def forward(self, x):
        factor = Factor()
        FACTORS.add(factor)
        return self.last(self.choosing(Doubled.apply(self.first(x), factor)))


FACTORS = weakref.WeakSet()


def step(model, batch):
    return model(batch["x"]).square().mean()


def trained(plan):
    """Train a model by a pipeline, and close that; returns its plan, and weak references to what it had."""
    model, batch = Model(), {"x": torch.randn(4, 4)}
    pipe = panpipe.pipeline(
        model, step, batch, optimizer=torch.optim.SGD, microbatches=2, mesh="pp=2", plan=plan,
        run=panpipe.Run(progress=False),
    )  # fmt: skip
    with pipe:
        pipe.step(batch)
    return pipe.plan, [weakref.ref(each) for each in (pipe, model, model.choosing)]


def test_closed_pipeline_frees_the_model_with_its_regions_and_the_sources_of_generated_code():
    plan, held = trained(panpipe.Auto(schedule="1f1b", max_chunks=1, cache=False))
    gc.collect()
    assert [each() for each in held] == [None] * 3
    assert not FACTORS  # the graphs of autograd had one
    before = len(_loader.eval_cache), len(linecache.cache)
    trained(plan)
    assert (len(_loader.eval_cache), len(linecache.cache)) == before
