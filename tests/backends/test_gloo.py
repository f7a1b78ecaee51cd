"""The gloo backend's end of a process group that somebody else made."""

import torch.distributed as dist
from panpipe.backends.gloo import GlooBackend


def test_closing_twice_leaves_the_caller_its_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        backend = GlooBackend()
        backend.close()
        backend.close()
        dist.barrier()
    finally:
        dist.destroy_process_group()
