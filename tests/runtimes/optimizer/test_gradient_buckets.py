"""Gradients in buckets: whether the host has to look at what is on a device."""

import pytest
import torch
from panpipe.runtimes.optimizer.gradient_buckets import Bucket
from torch import nn


class Alone:
    """The only replica: its sums are its own numbers."""

    def all_reduce(self, tensor):
        return None


def bucket_of(device, *present):
    parameters = [nn.Parameter(torch.ones(3, device=device)) for _ in present]
    bucket = Bucket(parameters)
    for parameter, there in zip(parameters, present, strict=True):
        parameter.grad = torch.full((3,), 2.0, device=device) if there else None
    return bucket


def test_reduction_does_not_read_tensors_if_every_parameter_has_a_gradient():
    """A tensor on meta has no values: reading it raises an error."""
    bucket = bucket_of("meta", True, True)
    bucket.reduce(Alone())
    bucket.assign_gradients()
    assert all(parameter.grad is bucket.gradients[parameter] for parameter in bucket.parameters)
    lacking = bucket_of("meta", True, False)
    lacking.reduce(Alone())
    with pytest.raises(NotImplementedError):
        lacking.assign_gradients()


def test_parameter_without_gradient_on_any_replica_keeps_none():
    bucket = bucket_of("cpu", True, False, True)
    bucket.reduce(Alone())
    bucket.assign_gradients()
    first, none, last = bucket.parameters
    assert none.grad is None
    assert [first.grad.tolist(), last.grad.tolist()] == [[2.0] * 3] * 2
