"""The reference workload: one reading, the same everywhere."""

import torch
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.profile.reference_workload import _reading, reference_s, workload_bytes
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


def test_reading_of_two_devices_is_a_plausible_time():
    team = ThreadTeam(2)
    assert 1e-4 < reference_s(team, passes=1) < 60
    team.close()


class Allocated(TorchDispatchMode):
    """The most bytes of this thread's tensors at once."""

    def __init__(self):
        super().__init__()
        self.most, self._held = 0, {}

    def __torch_dispatch__(self, function, types, given=(), named=None):
        made = function(*given, **(named or {}))
        self._held[made.untyped_storage()._cdata] = (
            StorageWeakRef(made.untyped_storage()),
            made.untyped_storage().nbytes(),
        )
        self.most = max(self.most, sum(size for held, size in self._held.values() if not held.expired()))
        return made


def test_reading_allocates_the_reserved_bytes():
    cpu = torch.device("cpu")
    with Allocated() as allocated:
        _reading({0: cpu}, 0, 2)
    assert allocated.most == workload_bytes(cpu)
