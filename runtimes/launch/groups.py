"""The process groups of a mesh: torch's ``DeviceMesh`` over the ranks, with dimensions ``pp`` and ``dp``."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...backends.data_collectives import all_gather_data
from ...backends.gloo import ENDLESS
from ...core.cluster.mesh import DATA, PIPELINE, Mesh, mesh_of
from ...core.errors import RequestError


def device_mesh(wanted: Mesh | DeviceMesh | None) -> tuple[Mesh, DeviceMesh]:
    """The mesh over all ranks, and its process groups. All ranks call this at once.

    Args:
        wanted: the mesh; None for one pipeline over all ranks. The groups of a ``DeviceMesh`` are used as they are.

    Raises:
        RequestError: it is for another number of ranks, has other dimensions, or differs between ranks.
    """
    ranks = dist.get_world_size()
    mesh = mesh_from_torch(wanted) if isinstance(wanted, DeviceMesh) else wanted or Mesh(ranks)
    _check(mesh, ranks)
    if isinstance(wanted, DeviceMesh) and set(wanted.mesh_dim_names or ()) == {PIPELINE, DATA}:
        return mesh, wanted
    if mesh.data == 1 and mesh.devices is None:
        return mesh, init_device_mesh("cpu", (ranks,), mesh_dim_names=(PIPELINE,))
    table = torch.tensor(mesh.cluster_devices).view(mesh.data, mesh.pipeline)
    groups = DeviceMesh("cpu", table, mesh_dim_names=(DATA, PIPELINE))
    for name in (DATA, PIPELINE):
        if groups.get_group(name) is not dist.group.WORLD:
            groups.get_group(name)._get_backend(torch.device("cpu"))._set_default_timeout(ENDLESS)
    return mesh, groups


def mesh_from_torch(found: DeviceMesh) -> Mesh:
    """The mesh of a ``DeviceMesh``; one of its two dimensions may be missing.

    Raises:
        RequestError: it has other dimensions.
    """
    names, table = list(found.mesh_dim_names or ()), found.mesh
    for missing in (PIPELINE, DATA):
        if len(names) == 1 and missing not in names:
            names, table = [*names, missing], table.unsqueeze(-1)
    if len(names) != 2:
        shape = " × ".join(map(str, found.mesh.shape))
        raise RequestError(
            f"the device mesh is {shape} with dimensions {', '.join(names) or 'without names'}: name them pp, along "
            "the pipeline, and dp, its replicas"
        )
    return mesh_of(names, table.tolist())


def _check(mesh: Mesh, ranks: int) -> None:
    if sorted(mesh.cluster_devices) != list(range(ranks)):
        raise RequestError(
            f"the mesh has the ranks {sorted(mesh.cluster_devices)} and the job has {ranks}, from 0: give a mesh of "
            "all ranks"
        )
    found = all_gather_data(mesh)
    other = next((rank for rank, there in enumerate(found) if there != found[0]), None)
    if other is not None:
        raise RequestError(
            f"rank {other} has the mesh {_text(found[other])} and rank 0 {_text(found[0])}: every rank must give the "
            "same one"
        )


def _text(mesh: Mesh) -> str:
    order = "" if mesh.devices is None else f" with replicas {', '.join(str(list(each)) for each in mesh.devices)}"
    return f"pp={mesh.pipeline},dp={mesh.data}{order}"
