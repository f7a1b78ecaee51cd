"""Items of a checkpoint are refused where they are of another kind than the pipeline's own."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.checkpoint.fitting import check_item


@pytest.mark.parametrize(
    ("name", "own", "found"),
    [
        ("progress.steps", 0, (1 << 63) - 1),
        ("progress.seed", 0, -5),
        ("ema.0.updates", 0, 3),
        ("scheduler", ("StepLR", {"gamma": 0.1}), ("StepLR", {"gamma": 1})),
        ("param_groups.w.lr", 0.1, 1),
        ("x", None, "text"),
        ("x", True, None),
        ("x", torch.zeros(2), torch.ones(2)),
        ("x", [0.9, 0.999], (0.8, 1)),
        ("x", {1: 2}, {3: 4.0, 5: 6}),
        ("x", "a", "b"),
    ],
)
def test_item_of_the_same_kind_is_accepted(name, own, found):
    check_item(name, own, found)


@pytest.mark.parametrize(
    ("name", "own", "found", "wanted"),
    [
        ("progress.steps", 0, -1, "is -1 in the checkpoint and must be a number of steps from 0"),
        ("progress.updates", 0, 1.5, "is 1.5"),
        ("progress.steps", 0, True, "is True"),
        ("ema.0.updates", 0, 1 << 70, "ema.0.updates. is 1180591620717411303424"),
        ("progress.seed", 0, 1 << 64, "a seed of 64 bits"),
        ("scheduler", ("StepLR", {}), ["StepLR", {}], "a class name and a state"),
        ("scaler", ("GradScaler", {}), (3, {}), "a class name and a state"),
        ("x", 0.5, "0.5", "a number of 64 bits"),
        ("x", None, [1], "must be a plain value"),
        ("x", False, 0, "true or false"),
        ("x", torch.zeros(2), torch.zeros(3), "torch.float32 of shape .2,."),
        ("x", torch.zeros(2), torch.zeros(2).double(), "must be a tensor, torch.float32 of shape .2,."),
        ("x", [1, 2], [1], "a list of 2"),
        ("x", [1, [2]], [1, ["a"]], r"'x\[1\]\[0\]' is 'a'"),
        ("x", {"a": 1}, {"b": 1}, "the checkpoint lacks 'a'"),
        ("x", {"a": 1}, {"a": 1, "b": 1}, "the pipeline lacks 'b'"),
        ("x", {"a": {"b": 1}}, {"a": {"b": None}}, "'x.a.b' is None"),
        ("x", {1: 2}, {1: "a"}, "a dict of numbers"),
        ("x", "a", 1, "must be a str"),
    ],
)
def test_item_of_another_kind_is_refused_by_its_name(name, own, found, wanted):
    with pytest.raises(RequestError, match=wanted):
        check_item(name, own, found)
