"""Which torch device each device of the pipeline is; and stages for GPUs, over fake tensors."""

import panpipe
import pytest
import torch
from panpipe.core.capture.programs.stage import set_device
from panpipe.core.errors import RequestError
from panpipe.runtimes.devices import devices
from panpipe.runtimes.profile import measured_cluster
from torch import fx

from ...laws.grouped import grouped
from ...support.cuts import batch_on
from ...support.models import CASES

CASE = CASES["tied gpt with dropout"]


def pipeline(**options):
    batch = batch_on(CASE, 4, torch.float32, "cpu")
    return panpipe.pipeline(
        CASE.model(torch.float32), CASE.step, batch, **grouped(microbatches=2, schedule="1f1b", **options)
    )


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (2, "devices is 2: name one for each device of the pipeline, such as 'cuda:0,cuda:1'; mesh=2 gives"),
        ("cpu,cpu,cpu", "devices names 3 and the pipeline has 2 devices: name one for each"),
        ("cpu", "devices names 1 and the pipeline has 2 devices: name one for each"),
        ("cpu,gpu:0", "devices names 'gpu:0': write cpu, or a GPU with its number, such as cuda:0"),
        ("", "devices names '': write cpu, or a GPU"),
        ([], "devices is empty"),
    ],
)
def test_wrong_device_names_are_refused(names, said):
    with pytest.raises(RequestError) as refused:
        pipeline(mesh="pp=2", devices=names)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
@pytest.mark.parametrize("names", ["cuda", "cuda:0,cuda:1"])
def test_missing_gpus_are_refused(names):
    with pytest.raises(RequestError, match=r"devices names 'cuda.*': PyTorch finds no GPU here; name devices of this"):
        pipeline(devices=names)


def test_mixed_device_types_and_unknown_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.parse_devices("cuda:0, cuda:1") == (torch.device("cuda:0"), torch.device("cuda:1"))
    assert devices.parse_devices([torch.device("cuda", 1)]) == (torch.device("cuda:1"),)
    with pytest.raises(RequestError, match="devices names cpu and cuda:0: a pipeline's programs are for one type"):
        devices.parse_devices("cpu,cuda:0")
    with pytest.raises(RequestError, match="devices names 'cuda:2': the GPUs here are cuda:0 to cuda:1"):
        devices.parse_devices("cuda:1,cuda:2")


def test_stage_compiled_for_another_gpu_has_that_device_in_every_operator():
    """What names a device of the captured type names the stage's; what is on the host stays there."""
    graph = fx.Graph()
    made = graph.call_function(torch.arange, (8,), {"device": torch.device("cuda", 0)})
    host = graph.call_function(torch.arange, (8,), {"device": torch.device("cpu")})
    moved = graph.call_function(torch.Tensor.to, (host, torch.device("cuda", 0)))
    graph.output((made, moved))
    set_device(graph, torch.device("cuda:3"))
    assert [node.kwargs.get("device") for node in (made, host)] == [torch.device("cuda:3"), torch.device("cpu")]
    assert moved.args == (host, torch.device("cuda:3"))


class GpuProperties:
    def __init__(self, uuid):
        self.uuid = uuid


class Ranks:
    """Ranks of several processes, of which each sees other GPUs: a team whose processes are called in turns."""

    local, size, replicas, rank_here = (0,), 2, 1, 0

    def __init__(self, uuids):
        self.uuids = uuids

    def everywhere(self, work):
        found = []
        for uuid in self.uuids:
            torch.cuda.get_device_properties = lambda device, uuid=uuid: GpuProperties(uuid)
            found.append(work(0))
        return found


@pytest.fixture
def one_gpu(monkeypatch):
    """Each process sees one GPU, with number 0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_LOCALID", None])
def test_a_rank_that_sees_one_gpu_uses_it_whatever_its_number_on_the_host(variable, monkeypatch, one_gpu):
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "3")
    assert devices.device_of_rank(None, 3, 4) == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert devices.device_of_rank(None, 3, 4) == torch.device("cuda", 3)


def test_gpus_of_ranks_are_compared_by_uuid(one_gpu):
    gpu = torch.device("cuda", 0)
    assert devices.assign_devices(Ranks(["GPU-a", "GPU-b"]), None, gpu, False, False) == {0: gpu}
    with pytest.raises(
        RequestError, match=r"devices 0 and 1 of the pipeline are both cuda:0 \(GPU GPU-a of .*\): each"
    ):
        devices.assign_devices(Ranks(["GPU-a", "GPU-a"]), None, gpu, False, False)


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_free_memory_of_a_gpu_is_shared_by_all_ranks_on_it_within_the_fraction_of_each(monkeypatch, one_gpu, fraction):
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12_000, 16_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    gpu = {0: torch.device("cuda", 0)}
    most = 16_000 * fraction
    assert measured_cluster.memory_of_each(Ranks(["GPU-a", "GPU-b"]), gpu) == min(12_500, most)
    assert measured_cluster.memory_of_each(Ranks(["GPU-a", "GPU-a", "GPU-a"]), gpu) == min(4_500, most)
