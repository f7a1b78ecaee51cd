"""Frameworks' ranks read the same batches: a pipeline of several replicas is refused."""

from types import SimpleNamespace

import pytest
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.errors import RequestError
from panpipe.integrations.replicas import refuse_replicas


def pipe(mesh):
    closed = []
    return SimpleNamespace(plan=SimpleNamespace(mesh=mesh), close=lambda: closed.append(True), closed=closed)


def test_several_replicas_are_refused_and_the_pipeline_is_closed():
    several = pipe(Mesh(2, 2))
    with pytest.raises(RequestError, match=r"pp=2,dp=2 has 2 replicas.*use mesh='pp=4'"):
        refuse_replicas(several)
    assert several.closed


def test_one_replica_is_kept():
    one = pipe(Mesh(4))
    assert refuse_replicas(one) is one
    assert not one.closed
