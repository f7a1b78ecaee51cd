"""The mesh of devices: the pipeline's length, the number of replicas, and the devices at each position.

It is written ``pp=4,dp=2``. The last dimension has neighbouring devices, as in torch's ``init_device_mesh``, so that
the first one crosses nodes::

    dp=2,pp=4    replicas 0 1 2 3 │ 4 5 6 7            a pipeline within a node, gradients reduced across nodes
    pp=4,dp=2    replicas 0 2 4 6 │ 1 3 5 7            replicas within a node, the pipeline's messages across nodes

With tensor parallelism each position has as many devices as there are *tensor ranks*, next to each other: they share
the work of the position's stages and run them in step (``tensor_groups.py``).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from attrs import evolve, frozen

from ..errors import RequestError
from ..files.limits import MOST_DEVICES
from .cluster import Cluster
from .tensor_groups import grouped

PIPELINE, DATA, TENSOR = "pp", "dp", "tp"
"""Names of the dimensions, in strings and in a ``DeviceMesh``."""

MOST_DIGITS = 7
"""Digits of a size; Python reads no number of thousands of digits."""

Number = TypeVar("Number", bound=float)


@frozen
class Mesh:
    """The sizes of the pipeline and data dimensions, and the cluster's devices in them.

    A *replica* is one whole pipeline. All replicas run the same orders, each on its own microbatches. Their devices
    are numbered replica by replica: *rank* ``replica × pipeline + position``.

    Args:
        pipeline: number of devices of one replica, one for each position along the pipeline.
        data: number of replicas.
        devices: per replica the cluster's devices, position by position with the tensor ranks of a position next to
            each other; None takes them in the cluster's order, so that rank r has device r without tensor ranks.
        tensor: number of tensor ranks at each position.
        context, experts: numbers of context ranks and of expert ranks at each position (``tensor_groups.py``).
        sharing: number of consecutive replicas that share a stage's state, each such group with a copy (hybrid
            sharding); None if all of them share it.
    """

    pipeline: int
    data: int = 1
    devices: tuple[tuple[int, ...], ...] | None = None
    tensor: int = 1
    sharing: int | None = None
    context: int = 1
    experts: int = 1

    @property
    def width(self) -> int:
        """Number of ranks at each position: tensor × context × experts."""
        return self.tensor * self.context * self.experts

    @property
    def sharers(self) -> int:
        """Number of replicas among which the state of a sharded stage is divided."""
        return self.sharing or self.data

    @property
    def ranks(self) -> int:
        """Number of positions of all replicas together; each has ``width`` devices."""
        return self.pipeline * self.data

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.ranks * self.width

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Per rank the cluster's devices of its tensor ranks."""
        whole = range(self.size) if self.devices is None else [each for replica in self.devices for each in replica]
        return tuple(tuple(whole[first : first + self.width]) for first in range(0, len(whole), self.width))

    @property
    def cluster_devices(self) -> tuple[int, ...]:
        """The cluster's device of every rank; the first one of its tensor ranks."""
        return tuple(group[0] for group in self.groups)

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Per replica the cluster's device at every position; the first one of its tensor ranks."""
        found = self.cluster_devices
        return tuple(found[first : first + self.pipeline] for first in range(0, len(found), self.pipeline))

    def check(self, cluster: Cluster | None = None) -> None:
        """Check the mesh, and that the cluster has its devices.

        Raises:
            RequestError: a dimension is below 1, the devices are not ``data`` × ``pipeline`` × ``tensor``, one is
                listed twice, the cluster does not have it, or the tensor ranks of a position have unequal devices.
        """
        shape = f"{self.pipeline} × {self.data}{f' × {self.tensor} tensor ranks' if self.tensor != 1 else ''}"
        if min(self.pipeline, self.data, self.tensor, self.context, self.experts) < 1:
            which = "both" if self.tensor == 1 else "all"
            raise RequestError(f"the mesh is {shape}: {which} must be at least 1; plan again")
        if self.sharing is not None and (self.sharing < 2 or self.data % self.sharing):
            raise RequestError(
                f"the mesh has {self.data} replicas, of which {self.sharing} share: give a divisor of {self.data} "
                "above 1"
            )
        if self.size > MOST_DEVICES:
            raise RequestError(f"the mesh is {shape}: it has at most {MOST_DEVICES} devices; plan again")
        if self.devices is not None:
            counts = [len(replica) for replica in self.devices]
            each = self.pipeline * self.width
            if counts != [each] * self.data:
                raise RequestError(
                    f"mesh.devices has replicas of {counts} devices: give {self.data} replicas of {each} each"
                )
            seen = set()
            for device in (device for group in self.groups for device in group):
                if device in seen or device < 0:
                    rule = "numbers start at 0" if device < 0 else "a device has one position in one replica"
                    raise RequestError(f"mesh.devices names device {device}{' twice' * (device >= 0)}: {rule}")
                seen.add(device)
        if cluster is None:
            return
        last = max(device for group in self.groups for device in group)
        if last >= len(cluster.devices):
            needs = f"needs {self.size} devices" if self.devices is None else f"uses device {last}, counted from 0,"
            raise RequestError(
                f"the plan {needs} and the cluster has {len(cluster.devices)}: use a larger cluster, or plan for this "
                "one"
            )

    def arrange(self, cluster: Cluster) -> Cluster:
        """The same cluster with its devices in the order of ranks; devices outside the mesh come last.

        With tensor ranks every device of the result is a group of them, and devices outside the mesh are omitted.

        Raises:
            RequestError: as in ``check``.
        """
        self.check(cluster)
        if self.width > 1:
            return grouped(cluster, self.groups, self.context, self.experts)
        return cluster if self.devices is None else _arranged(self, cluster)

    def place(self, device: int) -> tuple[int, int]:
        """Replica and position along the pipeline of one of the cluster's devices."""
        return divmod(self.cluster_devices.index(device), self.pipeline)

    def memory_bytes(self, cluster: Cluster) -> tuple[int, ...]:
        """Per position along the pipeline, the least memory of any replica's device. Errors as in ``check``."""
        self.check(cluster)
        if self.width > 1:
            grouped(cluster, self.groups, self.context, self.experts)  # checks that the devices of a group are equal
        return least_by_position([device.memory_bytes for device in cluster.devices], self.replicas)


def least_by_position(values: Sequence[Number], replicas: Sequence[Sequence[int]]) -> tuple[Number, ...]:
    """Per position along the pipeline, the minimum over the replicas of their device's value.

    Args:
        values: one for each of the cluster's devices.
        replicas: per replica the cluster's device at every position.
    """
    return tuple(min(values[device] for device in same) for same in zip(*replicas, strict=True))


@lru_cache(maxsize=128)
def _arranged(mesh: Mesh, cluster: Cluster) -> Cluster:
    used = mesh.cluster_devices
    rest = [number for number in range(len(cluster.devices)) if number not in set(used)]
    return cluster.arranged((*used, *rest))


@frozen
class MeshShape:
    """A mesh as the user writes it, before the number of devices is known.

    Args:
        text: as written.
        pipeline, data: size of each dimension; None if it is not given.
        pipeline_last: whether neighbours along the pipeline have neighbouring device numbers.
        tensor: number of tensor ranks; None if it is not given.
    """

    text: str
    pipeline: int | None
    data: int | None
    pipeline_last: bool = True
    tensor: int | None = None

    def over(self, devices: int | None, what: str = "devices") -> Mesh:
        """The mesh over this many devices, all of which it uses.

        ``dp`` defaults to 1, and ``pp`` to the number of devices divided by ``dp``.

        Args:
            devices: how many there are; None for as many as the mesh has.
            what: the word for them in messages.

        Raises:
            RequestError: the mesh has another number of devices.
        """
        data = self.data or 1
        left = 2 if devices is None else max(devices // data, 1)
        pipeline = self.pipeline or left
        if devices is not None and pipeline * data != devices:
            raise RequestError(
                f"mesh '{self.text}' is for {pipeline * data} devices and there are {devices} {what}: give dimensions "
                f"whose product is {devices}, such as {_fitting(devices, data)}, or {pipeline * data} {what}"
            )
        if data == 1 or self.pipeline_last:
            return Mesh(pipeline, data)
        return plain(Mesh(pipeline, data, tuple(tuple(range(r, pipeline * data, data)) for r in range(data))))


def _fitting(devices: int, data: int) -> str:
    return f"pp={devices // data},dp={data}" if data > 1 and devices % data == 0 else f"pp={devices}"


def parse_mesh(text: str, tensor: bool = False) -> MeshShape:
    """Read a mesh such as ``pp=4``, ``pp=4,dp=2`` or ``dp=2,pp=4``.

    Args:
        tensor: whether it may have a dimension ``tp``.

    Raises:
        RequestError: the text has another form, a name is unknown or appears twice, or a size is below 1.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        if not number.isdecimal() or len(number) > MOST_DIGITS:
            raise RequestError(f"'{text}' is not a mesh: write its dimensions and their sizes, such as pp=4,dp=2")
        if name not in (PIPELINE, DATA, *([TENSOR] if tensor else [])):
            known = f"pp (the pipeline){', tp (tensor ranks)' if tensor else ''} and dp (its replicas)"
            raise RequestError(
                f"mesh '{text}' has a dimension '{name}': the dimensions are {known}; write for example pp=4,dp=2"
            )
        if name in sizes or int(number) < 1:
            rule = f"{name} twice" if name in sizes else f"{name}={number}"
            raise RequestError(f"mesh '{text}' has {rule}: give every dimension once, at least 1")
        sizes[name] = int(number)
    last = [name for name in sizes if name != TENSOR][-1:]
    return MeshShape(text, sizes.get(PIPELINE), sizes.get(DATA), last == [PIPELINE], sizes.get(TENSOR))


def plain(mesh: Mesh) -> Mesh:
    """The same mesh; ``devices`` becomes None if they are in the order of their numbers."""
    in_order = tuple(device for group in mesh.groups for device in group) == tuple(range(mesh.size))
    return evolve(mesh, devices=None) if in_order else mesh
