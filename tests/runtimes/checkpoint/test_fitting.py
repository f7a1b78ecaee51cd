"""Whether a checkpoint fits a pipeline, before anything is overwritten."""

from types import SimpleNamespace

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.checkpoint.fitting import fitted
from panpipe.runtimes.checkpoint.reading import StoredTensor
from panpipe.runtimes.checkpoint.state_parts import Parts


class Training:
    """Records what it is asked to check."""

    def __init__(self):
        self.classes = self.names = self.packing = None

    def check_classes(self, found):
        self.classes = found

    def check(self, shapes):
        self.names = shapes

    def packed(self, state):
        self.packing = state


def checkpoint(tensors, items):
    kept = {name: StoredTensor(tuple(t.shape), t.dtype, None) for name, t in tensors.items()}
    return SimpleNamespace(tensors=kept, items=items)


OWN = Parts({"model.w": torch.zeros(2, 3)}, {"progress.steps": 0, "optimizer.param_groups.w.lr": torch.tensor(0.1)})
ITEMS = {"progress.steps": 5, "optimizer.param_groups.w.lr": torch.tensor(0.2), "progress.optimizer": "SGD"}


def test_parts_are_the_pipelines_tensors_and_the_checkpoints_items():
    training = Training()
    found = fitted(OWN, checkpoint({"model.w": torch.ones(2, 3)}, ITEMS), training)
    assert found.tensors["model.w"] is OWN.tensors["model.w"]
    assert found.items["progress.steps"] == 5
    assert found.items["optimizer.param_groups.w.lr"].item() == pytest.approx(0.2)
    assert set(found.items) == set(OWN.items)
    assert training.classes == {"progress": {"optimizer": "SGD"}}
    assert training.names == {"model.w": (2, 3), **dict.fromkeys(ITEMS)}
    assert training.packing["progress"] == {"steps": 5}


@pytest.mark.parametrize(
    ("tensors", "items", "said"),
    [
        ({}, ITEMS, r"the checkpoint has no tensor 'model\.w', which the pipeline has: resume with the model"),
        ({"model.w": torch.ones(3, 2)}, ITEMS, r"'model\.w' is torch\.float32 of shape \(3, 2\) in the checkpoint and"),
        ({"model.w": torch.ones(2, 3).double()}, ITEMS, r"torch\.float64 of shape \(2, 3\) in the checkpoint"),
        ({"model.w": torch.ones(2, 3)}, {}, r"the checkpoint has no 'progress\.steps'"),
        ({"model.w": torch.ones(2, 3)}, {**ITEMS, "progress.steps": -1}, r"progress\.steps"),
        ({"model.w": torch.ones(2, 3)}, {**ITEMS, "scheduler": "StepLR"}, "scheduler"),
        ({"model.w": torch.ones(2, 3)}, {**ITEMS, "scaler": ("Scaler", 3)}, "scaler"),
    ],
)
def test_other_checkpoint_is_refused(tensors, items, said):
    with pytest.raises(RequestError, match=said):
        fitted(OWN, checkpoint(tensors, items), Training())
