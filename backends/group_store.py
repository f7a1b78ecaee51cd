"""The store of a process group that some ranks create without the others."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


def group_store(kind: str, ranks: Sequence[int], place: int) -> Any:
    """A part of the job's store for one group, the same for all its ranks if they create their groups in one order.

    ``dist.new_group`` needs all ranks of the job for every group. Its ``use_local_synchronization`` names a group after
    its ranks and the number of groups that a rank has, which differs between ranks, so that they would wait forever.

    Args:
        ranks: of the group, in the job.
        place: this rank's index among them.
    """
    c10d = dist.distributed_c10d
    store = c10d._get_default_store()
    name = f"panpipe/{kind}/{','.join(map(str, ranks))}"
    return c10d.PrefixStore(f"{name}/{store.add(f'{name}/{ranks[place]}', 1)}", store)
