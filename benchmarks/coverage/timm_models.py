"""Image classifiers of timm, one of each family, with cross-entropy on small images."""

from functools import partial
from typing import Any

import timm

from benchmarks.coverage.case import Case, Suite, classes, images
from benchmarks.coverage.torchvision_models import classifier_step

RESIZED = (
    "beit_base_patch16_224", "cait_xxs24_224", "coatnet_0_rw_224", "deit3_small_patch16_224",
    "eva02_tiny_patch14_224", "gmlp_s16_224",
    "levit_128s", "mixer_s32_224", "swinv2_cr_tiny_224", "visformer_tiny",
)  # fmt: skip
"""Made for the size of their images."""
OTHERS = (
    "convnextv2_atto", "edgenext_xx_small", "fastvit_t8", "mobilevit_s", "poolformer_s12", "repvgg_a0",
    "res2net50_26w_4s",
    "skresnet18", "tiny_vit_5m_224", "xcit_nano_12_p16_224",
)  # fmt: skip
WITHOUT_DROP_PATH = ("dla34", "dpn68", "ghostnet_100", "hrnet_w18_small")


def classifier(name: str, size: int = 32, **options: Any) -> Case:
    """A classifier, with dropout."""
    model = timm.create_model(name, pretrained=False, num_classes=10, drop_rate=0.1, **options)
    return Case(model.train(), classifier_step, {"image": images(size), "label": classes(10)})


def suite() -> Suite:
    """The models."""
    found: Suite = {name: partial(classifier, name, img_size=32, drop_path_rate=0.1) for name in RESIZED}
    found |= {name: partial(classifier, name, 64, drop_path_rate=0.1) for name in OTHERS}
    found["efficientformer_l1"] = partial(classifier, "efficientformer_l1", 224, drop_path_rate=0.1)
    return found | {name: partial(classifier, name, 64) for name in WITHOUT_DROP_PATH}
