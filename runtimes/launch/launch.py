"""Creates the team of this process, from the way it was launched and the user's mesh and backend.

Under ``torchrun``, or in a process group, a process is a rank; otherwise all devices are threads of the process.
"""

import os

import torch.distributed as dist

from ...backends import nccl
from ...backends.kind import BackendKind
from ...backends.registry import find_backend
from ...core.cluster.mesh import Mesh, MeshShape, plain
from ...core.errors import RequestError, warn_caller
from ...core.plan.plan import Plan
from .meeting import Meeting
from .rank_team import RankTeam
from .rank_tensors import WHOLE, RankTensors
from .team import Team, ThreadTeam

MeshRequest = Mesh | MeshShape | None
"""The user's mesh, or the dimensions that are known of it before the number of ranks is; None for the default."""


def make_team(
    mesh: MeshRequest = None,
    backend: str | BackendKind | None = None,
    device_type: str = "cpu",
    share: bool = False,
    timeout_s: float | None = None,
    meeting: Meeting | None = None,
    tensors: RankTensors = WHOLE,
) -> Team:
    """The team for this process: ranks under ``torchrun`` or in a process group, threads otherwise.

    Args:
        backend: the transport; None for memcpy between threads, and between ranks for nccl on GPUs if it works,
            otherwise gloo.

    Raises:
        RequestError: the backend is unknown or does not fit this launch, or the number of ranks is another one.
        WorkerError: a rank did not arrive.
    """
    _, world = rank_of_job() or (0, None)
    kind = find_backend(backend or ("memcpy" if world is None else _between_ranks(device_type, share)))
    if world is None or (world == 1 and kind.ranks is None):
        if kind.threads is None:
            raise RequestError(
                f"backend '{kind.name}' needs ranks: start the script with torchrun, or use backend='memcpy'"
            )
        found = _of_one_replica(
            mesh,
            "a mesh of {data} replicas in one process: each replica needs its own parameters and processes; start the "
            "script with torchrun --nproc-per-node {ranks}",
        )
        return ThreadTeam(found.pipeline, kind, timeout_s)
    if kind.ranks is None:
        raise RequestError(
            f"backend '{kind.name}' connects threads of one process and this process is one of {world} ranks: "
            "start the script without torchrun, or use backend='gloo'"
        )
    return RankTeam(kind, timeout_s, None if tensors.divided else _over_ranks(mesh, world), meeting, tensors)


def _between_ranks(device_type: str, share: bool) -> str:
    """The name of the transport between ranks."""
    if device_type != "cuda":
        return "gloo"
    reason = "ranks share GPUs" if share else nccl.KIND.unavailable
    if reason is None:
        return "nccl"
    warn_caller(f"messages go over gloo, through the host's memory, and not over nccl: {reason}")
    return "gloo"


def _over_ranks(mesh: MeshRequest, world: int) -> Mesh | None:
    """The mesh over all ranks of the job."""
    if isinstance(mesh, MeshShape):
        return mesh.over(world, "ranks")
    if isinstance(mesh, Mesh):
        if mesh.ranks != world:
            raise RequestError(
                f"the mesh pp={mesh.pipeline},dp={mesh.data} is for {mesh.ranks} devices and the job has {world} "
                f"ranks: they must be equal; start it with torchrun --nproc-per-node {mesh.ranks}, or plan for {world}"
            )
        if max(mesh.cluster_devices) >= world:
            raise RequestError(
                f"the plan uses the devices {list(mesh.cluster_devices)} of its cluster and the job has {world} "
                "ranks, from 0: rank i runs as device i of the cluster; plan for a cluster of only these devices"
            )
    return mesh


def _of_one_replica(mesh: MeshRequest, several: str) -> Mesh:
    """The given mesh, or one of two devices.

    Args:
        several: the error for several replicas, with places for their number ``data``, and for that of all ``ranks``.
    """
    found = mesh.over(None) if isinstance(mesh, MeshShape) else mesh or Mesh(2)
    if found.data > 1:
        raise RequestError(several.format(data=found.data, ranks=found.ranks))
    return found


def refuse_planned_only(plan: Plan) -> None:
    """Refuse a plan with what is planned and simulated, and does not train. Raises RequestError."""
    mesh, within = plan.mesh, plan.memory.within
    found: dict[str, tuple[str, object]] = {
        f"{mesh.context} context ranks": ("--cp", mesh.context > 1),
        f"{mesh.experts} expert ranks": ("--ep", mesh.experts > 1),
        f"groups of {mesh.sharing} replicas that share": ("a number in --shard", mesh.sharing is not None),
        f"recomputation of {within} within stages": (f"--recompute {within}", within),
    }
    for what, (option, present) in found.items():
        if present:
            raise RequestError(
                f"the plan has {what}, which is planned and simulated and does not train: plan without {option}"
            )


def mesh_for(plan: Plan | None, mesh: MeshRequest) -> MeshRequest:
    """The plan's mesh, which must equal the given one; without a plan, the given one.

    Raises:
        RequestError: they differ.
    """
    if plan is None or mesh is None:
        return mesh if plan is None else plan.mesh
    if isinstance(mesh, MeshShape):
        same = mesh.pipeline in (None, plan.mesh.pipeline) and mesh.data in (None, plan.mesh.data)
    else:
        same = plain(mesh) == plain(plan.mesh)
    if not same:
        asked = f"'{mesh.text}'" if isinstance(mesh, MeshShape) else str(mesh)
        raise RequestError(
            f"mesh is {asked} and the plan is for pp={plan.mesh.pipeline},dp={plan.mesh.data}: leave mesh out, or "
            "plan again"
        )
    return plan.mesh


def replica_here(plan: Plan | None, mesh: MeshRequest) -> tuple[int, int]:
    """The replica that this rank belongs to, and the number of replicas; 0 and 1 if this process is no rank.

    Args:
        plan: the plan of the pipeline; None if it is not known yet.

    Raises:
        RequestError: they contradict each other, or are for another number of ranks.
    """
    wanted, job = mesh_for(plan, mesh), rank_of_job()
    if job is None or wanted is None or (wanted.tensor or 1) > 1:  # with tensor ranks a pipeline has one replica
        return 0, 1
    known = _over_ranks(wanted, job[1])
    assert known is not None
    return next((number for number, ranks in enumerate(known.replicas) if job[0] in ranks), 0), known.data


def rank_of_job() -> tuple[int, int] | None:
    """This rank and the number of ranks; None if this process is no rank."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return None


def virtual_team(mesh: MeshRequest) -> Team:
    """The team of simulated devices, all of them in this process.

    Raises:
        RequestError: this is one of several ranks.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise RequestError(
            "backend 'simulator' has all its devices in one process and this process is one of "
            f"{os.environ['WORLD_SIZE']} ranks: start the script without torchrun"
        )
    return ThreadTeam(mesh_in_simulator(mesh).pipeline)


def mesh_in_simulator(mesh: MeshRequest) -> Mesh:
    """The mesh of simulated devices, with one replica.

    Raises:
        RequestError: it has several replicas.
    """
    return _of_one_replica(
        mesh,
        "backend 'simulator' trains one replica and the mesh has {data}: leave dp out; the command panpipe simulate "
        "predicts a step of all replicas",
    )
