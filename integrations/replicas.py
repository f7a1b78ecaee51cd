"""Frameworks give all ranks the same batches here, so a pipeline of theirs has one replica."""

from ..core.errors import RequestError
from ..runtimes.pipeline import Pipeline


def refuse_replicas(pipe: Pipeline) -> Pipeline:
    """The pipeline, which must have one replica.

    Raises:
        RequestError: it has several; they would train on the same batches.
    """
    mesh = pipe.plan.mesh
    if mesh.data > 1:
        pipe.close()
        raise RequestError(
            f"the mesh pp={mesh.pipeline},dp={mesh.data} has {mesh.data} replicas, and this framework gives all of "
            f"them the same batches: use mesh='pp={mesh.ranks}', or panpipe.pipeline in a loop of your own"
        )
    return pipe
