"""Models of torchvision that TorchBench has not: classification, segmentation, video, optical flow and detection."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from torch.nn import functional as F

from benchmarks.coverage.case import ROWS, Case, Suite, classes, images

CLASSIFIERS = {
    "googlenet": 64, "mobilenet_v3_small": 64, "efficientnet_v2_s": 64, "regnet_y_400mf": 64, "convnext_tiny": 64,
    "vit_b_16": 32,
    "swin_v2_t": 64, "maxvit_t": 224,
}  # fmt: skip
"""Name → size of its images."""
OPTIONS = {"googlenet": {"init_weights": True}, "vit_b_16": {"image_size": 32}}
DETECTORS = {
    "fasterrcnn_mobilenet_v3_large_320_fpn": {"min_size": 64, "max_size": 64},
    "retinanet_resnet50_fpn": {"min_size": 64, "max_size": 64},
    "fcos_resnet50_fpn": {"min_size": 64, "max_size": 64},
    "ssdlite320_mobilenet_v3_large": {},
}


def classifier_step(model: Any, batch: Any) -> Any:
    """As in references/classification: auxiliary heads count as they do there."""
    output = model(batch["image"])
    if isinstance(output, tuple):
        return sum((0.4**i) * F.cross_entropy(each, batch["label"]) for i, each in enumerate(output[:2]))
    return F.cross_entropy(output, batch["label"])


def classifier(make: Callable[[], Any], size: int) -> Case:
    """An image classifier."""
    return Case(make().train(), classifier_step, {"image": images(size), "label": classes(10)})


def segmentation_step(model: Any, batch: Any) -> Any:
    """As in references/segmentation."""
    output = model(batch["image"])
    loss = F.cross_entropy(output["out"], batch["mask"], ignore_index=255)
    return loss + 0.5 * F.cross_entropy(output["aux"], batch["mask"], ignore_index=255) if "aux" in output else loss


def segmentation(make: Callable[..., Any], **options: Any) -> Case:
    """A model of segmentation with an auxiliary head where there is one."""
    model = make(weights=None, weights_backbone=None, num_classes=5, **options).train()
    return Case(model, segmentation_step, {"image": images(64), "mask": classes(5, ROWS, 64, 64)})


def flow_step(model: Any, batch: Any) -> Any:
    """The sequence loss of references/optical_flow."""
    flows = model(batch["first"], batch["second"])
    return sum(0.8 ** (len(flows) - i - 1) * (flow - batch["flow"]).abs().mean() for i, flow in enumerate(flows))


def flow() -> Case:
    """RAFT, with two updates."""
    model = torchvision.models.optical_flow.raft_small(weights=None).train()
    batch = {"first": images(128, rows=4), "second": images(128, rows=4), "flow": images(128, 2, rows=4)}
    return Case(model, flow_step, batch)


def detection_step(model: Any, batch: Any) -> Any:
    """As in references/detection: the model returns its losses."""
    return sum(model(batch["images"], batch["targets"]).values())


def detection(make: Callable[..., Any], **options: Any) -> Case:
    """A detector, with two boxes an image."""
    model = make(weights=None, weights_backbone=None, num_classes=5, **options).train()
    corners = torch.rand(ROWS, 2, 2) * 30
    targets = [{"boxes": torch.cat([each, each + 20], 1), "labels": torch.tensor([1, 2])} for each in corners]
    batch = {"images": list(torch.rand(ROWS, 3, 64, 64)), "targets": targets}
    return Case(model, detection_step, batch, {"batch_dims": {"images": "samples", "targets": "samples"}})


def suite() -> Suite:
    """The models."""
    models, segment = torchvision.models, torchvision.models.segmentation
    found: Suite = {
        name: partial(classifier, partial(getattr(models, name), weights=None, num_classes=10, **OPTIONS.get(name,
        {})), size)
        for name, size in CLASSIFIERS.items()
    }  # fmt: skip
    found["deeplabv3_mobilenet_v3_large"] = partial(segmentation, segment.deeplabv3_mobilenet_v3_large, aux_loss=True)
    found["lraspp_mobilenet_v3_large"] = partial(segmentation, segment.lraspp_mobilenet_v3_large)
    found["r3d_18"] = lambda: Case(
        models.video.r3d_18(weights=None, num_classes=10).train(), classifier_step,
        {"image": torch.randn(ROWS, 3, 4, 32, 32), "label": classes(10)},
    )  # fmt: skip
    found["raft_small"] = flow
    for name, options in DETECTORS.items():
        found[name] = partial(detection, getattr(models.detection, name), **options)
    return found
