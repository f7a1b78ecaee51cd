"""Which torch device each device of the pipeline is; and stages for GPUs, over fake tensors."""

import panpipe
import pytest
import torch
from panpipe.core.capture.programs.stage import set_device
from panpipe.core.errors import RequestError
from panpipe.runtimes.devices import devices
from torch import fx

from ...support.cuts import batch_on
from ...support.models import CASES

CASE = CASES["tied gpt with dropout"]


def pipeline(**options):
    batch = batch_on(CASE, 4, torch.float32, "cpu")
    return panpipe.pipeline(CASE.model(torch.float32), CASE.step, batch, microbatches=2, schedule="1f1b", **options)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("cpu,cpu", "devices 0 and 1 of the pipeline are both cpu: each needs its own; name another, or pass"),
        ("cpu,cpu,cpu", "devices names 3 and the pipeline has 2 devices: name one for each"),
        ("cpu", "devices names 1 and the pipeline has 2 devices: name one for each"),
        ("cpu,gpu:0", "devices names 'gpu:0': write cpu, or a GPU with its number, such as cuda:0"),
        ("", "devices names '': write cpu, or a GPU"),
        ([], "devices names none"),
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


def test_number_of_listed_devices_is_the_pipelines_size():
    batch = batch_on(CASE, 4, torch.float32, "cpu")
    pipe = pipeline(devices="cpu,cpu,cpu", share_devices=True, max_chunks=1)
    assert pipe.plan.devices == 3
    assert torch.isfinite(pipe.step(batch))


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
