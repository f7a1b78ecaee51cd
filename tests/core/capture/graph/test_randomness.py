"""Random numbers depend on (seed, step, microbatch, ordinal) and nothing else."""

import threading

import pytest
import torch
from panpipe.core.capture.graph.randomness import KeyedRandom, bernoulli, random_key
from panpipe.core.errors import RequestError
from torch.nn import functional as F

DRAWS = {
    "dropout": lambda: F.dropout(torch.ones(64), 0.5),
    "attention dropout": lambda: F.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3, dropout_p=0.5),
    "rand": lambda: torch.rand(8),
    "randn": lambda: torch.randn(8),
    "rand_like": lambda: torch.rand_like(torch.ones(8)),
    "randint": lambda: torch.randint(0, 1000, (8,)),
    "randint from": lambda: torch.randint(5, 1000, (8,)),
    "randperm": lambda: torch.randperm(64),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(64), 8),
    "dirichlet": lambda: torch.distributions.Dirichlet(torch.full((4,), 0.5)).sample(),
    "beta": lambda: torch.distributions.Beta(torch.tensor(0.4), torch.tensor(0.4)).sample(),
    "gamma": lambda: torch.distributions.Gamma(torch.full((4,), 0.5), torch.ones(4)).sample(),
    "normal": lambda: torch.distributions.Normal(torch.zeros(4), torch.ones(4)).sample(),
    "normal of a number": lambda: torch.normal(torch.zeros(4), 2.0),
    "normal_": lambda: torch.empty(8).normal_(),
    "uniform_": lambda: torch.empty(8).uniform_(),
    "exponential_": lambda: torch.empty(8).exponential_(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draw_is_determined_by_its_key(draw):
    results = {}
    for name, key in {"a": (0, 0, 0), "same": (0, 0, 0), "seed": (1, 0, 0), "step": (0, 1, 0), "mb": (0, 0, 1)}.items():
        torch.manual_seed(hash(name) % 1000)  # the default generator has no say
        with KeyedRandom(random_key(*key)) as mode:
            results[name] = draw()
        assert mode.ordinal == 1
    assert torch.equal(results["a"], results["same"])
    for other in ("seed", "step", "mb"):
        assert not torch.equal(results["a"], results[other])


def test_draws_have_ascending_ordinals():
    with KeyedRandom(random_key(0, 0, 0)):
        first, second = torch.rand(8), torch.rand(8)
    with KeyedRandom(random_key(0, 0, 0), first_ordinal=1):
        again = torch.rand(8)
    assert not torch.equal(first, second)
    assert torch.equal(second, again)


def test_operators_that_draw_nothing_have_no_ordinal():
    q = torch.ones(1, 1, 4, 8)
    with KeyedRandom(random_key(0, 0, 0)) as mode:
        F.scaled_dot_product_attention(q, q, q)
        F.dropout(torch.ones(4), 0.5, training=False)
    assert mode.ordinal == 0


def test_recurrent_layer_in_evaluation_mode_draws_nothing():
    def on_meta(*shape):
        return torch.empty(shape, device="meta")

    weights, state = [on_meta(16, 4), on_meta(16, 4), on_meta(16), on_meta(16)], on_meta(1, 2, 4)
    run = torch.ops.aten._cudnn_rnn.default  # cuDNN's operator has the rate of the dropout in evaluation mode, too

    def call(rate, train):
        given = (on_meta(3, 2, 4), weights, 4, on_meta(160), state, state, 2, 4, 0, 1, False, rate, train, False, [])
        with KeyedRandom(random_key(0, 0, 0)):
            return run(*given, None)[0].shape

    assert call(0.5, False) == call(0.0, True) == (3, 2, 4)
    with pytest.raises(RequestError, match="_cudnn_rnn"):
        call(0.5, True)


def test_an_operator_that_cannot_be_keyed_is_refused_by_name():
    with pytest.raises(RequestError, match="poisson"), KeyedRandom(random_key(0, 0, 0)):
        torch.poisson(torch.ones(4))


def test_bernoulli_keeps_the_given_share():
    kept = bernoulli(torch.empty(100_000), 0.9, random_key(0, 0, 0), 0).mean().item()
    assert kept == pytest.approx(0.9, abs=0.005)


def test_threads_draw_independently():
    key, found = random_key(0, 0, 0), {}

    def draw(thread: int) -> None:
        found[thread] = [bernoulli(torch.empty(256), 0.5, key, i) for i in range(200)]

    threads = [threading.Thread(target=draw, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
