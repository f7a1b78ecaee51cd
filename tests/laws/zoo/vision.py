"""Vision and image-text models from transformers, and some written in plain torch."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from .entry import Entry, classes, generator, images, tokens

CLASSES = 10
VOCABULARY = 64
IMAGE_TOKEN = 63
PATCHES = 16

Batch = dict[str, Tensor]
ENCODER: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64,
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "image_size": 32, "patch_size": 8,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "attention_dropout": 0.1, "initializer_range": 0.02,
}  # fmt: skip
SEEN = {**TOWER, "image_size": 32, "patch_size": 8}
READ = {**TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 8, "bos_token_id": 1,
        "eos_token_id": VOCABULARY - 1}  # fmt: skip


def labelled(size: int) -> Callable[[int], Batch]:
    """Batches of images with a class each."""
    return lambda rows: {"pixel_values": images(rows, size), "labels": classes(rows, CLASSES)}


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy over the logits of a transformers classifier."""
    return F.cross_entropy(model(pixel_values=batch["pixel_values"]).logits, batch["labels"])


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model computes itself."""
    return model(**batch).loss


def clip() -> nn.Module:
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=READ, vision_config=SEEN, projection_dim=16))


def captioned(rows: int) -> Batch:
    """Images with a caption each, which ends with the last token of the vocabulary."""
    ids = torch.cat([tokens(rows, 7, VOCABULARY - 1), torch.full((rows, 1), VOCABULARY - 1)], dim=1)
    return {"pixel_values": images(rows, 32), "input_ids": ids}


def contrast(model: nn.Module, batch: Batch) -> Tensor:
    """The symmetric contrastive loss of CLIP."""
    logits = model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"]).logits_per_image
    labels = torch.arange(logits.shape[0], device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def blip() -> nn.Module:
    text = {**READ, "encoder_hidden_size": 32, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
            "use_cache": False, "sep_token_id": VOCABULARY - 1}  # fmt: skip
    return transformers.BlipForConditionalGeneration(transformers.BlipConfig(text_config=text, vision_config=SEEN))


def captions(rows: int) -> Batch:
    """Images with a caption each, which is to be predicted."""
    batch = captioned(rows)
    return {**batch, "labels": batch["input_ids"]}


def llava() -> nn.Module:
    text = {**TOWER, "hidden_size": 24, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "use_cache": False}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**{**SEEN, "num_hidden_layers": 3}),
        text_config=transformers.LlamaConfig(**text), image_token_index=IMAGE_TOKEN, image_seq_length=PATCHES,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


def prompted(rows: int) -> Batch:
    """Images, and dialogues in which an image follows the second token."""
    text = tokens(rows, 10, IMAGE_TOKEN)
    ids = torch.cat([text[:, :2], torch.full((rows, PATCHES), IMAGE_TOKEN), text[:, 2:]], dim=1)
    return {
        "pixel_values": images(rows, 32),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ids == IMAGE_TOKEN, -100),
    }


def answer(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of predicting each next token of the text."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**inputs).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def segformer() -> nn.Module:
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=(2, 2), sr_ratios=(2, 1), hidden_sizes=(16, 32), patch_sizes=(7, 3),
        strides=(4, 2), num_attention_heads=(1, 2), mlp_ratios=(2, 2), hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1, drop_path_rate=0.2, decoder_hidden_size=32, num_labels=CLASSES,
    )  # fmt: skip
    return transformers.SegformerForSemanticSegmentation(config)


def segmented(rows: int) -> Batch:
    """Images with a class for each pixel."""
    labels = torch.randint(0, CLASSES, (rows, 32, 32), generator=generator())
    return {"pixel_values": images(rows, 32), "labels": labels}


def segment(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of each pixel, over logits that are scaled up to the image."""
    logits = model(pixel_values=batch["pixel_values"]).logits
    logits = F.interpolate(logits, size=batch["labels"].shape[-2:], mode="bilinear", align_corners=False)
    return F.cross_entropy(logits, batch["labels"])


def detr() -> nn.Module:
    backbone = {"embedding_size": 16, "hidden_sizes": (32, 64), "depths": (1, 2), "out_features": ["stage2"]}
    config = transformers.DetrConfig(
        use_timm_backbone=False, backbone_config=transformers.ResNetConfig(**backbone), num_queries=6, d_model=32,
        encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64, decoder_layers=2, decoder_attention_heads=4,
        decoder_ffn_dim=64, dropout=0.1, attention_dropout=0.1, activation_dropout=0.1, num_labels=CLASSES,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config)


def boxed(rows: int, boxes: int) -> Batch:
    """Images with boxes, as centre and size, and the class of each box."""
    drawn = torch.rand(rows, boxes, 4, generator=generator()) * 0.4 + 0.3
    return {
        "pixel_values": images(rows, 32),
        "boxes": drawn,
        "class_labels": torch.randint(0, CLASSES, (rows, boxes), generator=generator()),
    }


def detect(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy and L1 over the queries in their order."""
    out = model(pixel_values=batch["pixel_values"])
    named = F.cross_entropy(out.logits.flatten(0, 1), batch["class_labels"].flatten())
    return named + 5 * F.l1_loss(out.pred_boxes, batch["boxes"])


def detect_matched(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that DETR computes over the queries that match the boxes best."""
    pairs = zip(batch["class_labels"], batch["boxes"], strict=True)
    labels = [{"class_labels": named, "boxes": boxes} for named, boxes in pairs]
    return model(pixel_values=batch["pixel_values"], labels=labels).loss


class DenseLayer(nn.Module):
    """Adds a few channels to all that came before it in its block."""

    def __init__(self, channels: int, growth: int, drop: float):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.drop = drop

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.conv1(self.relu(self.norm1(torch.cat(features, dim=1))))
        x = self.conv2(self.relu(self.norm2(x)))
        return F.dropout(x, self.drop, self.training)


class DenseBlock(nn.Module):
    """Layers that each see the outputs of all before them."""

    def __init__(self, layers: int, channels: int, growth: int, drop: float):
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(channels + i * growth, growth, drop) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, dim=1)


class DenseNet(nn.Module):
    """Dense blocks with transitions between them."""

    def __init__(self, blocks: tuple[int, ...] = (3, 3), channels: int = 16, growth: int = 8, drop: float = 0.1):
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)]
        for number, count in enumerate(blocks):
            if number:
                layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.Conv2d(channels, channels // 2, 1)]
                layers += [nn.AvgPool2d(2)]
                channels //= 2
            layers += [DenseBlock(count, channels, growth, drop)]
            channels += count * growth
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.features(x), inplace=True)
        return self.classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut, added in place."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class PlainResNet(nn.Module):
    """A ResNet of basic blocks."""

    def __init__(self, widths: tuple[int, ...] = (16, 32), depth: int = 2):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)
        )
        blocks, before = [], widths[0]
        for stage, width in enumerate(widths):
            for number in range(depth):
                blocks.append(BasicBlock(before, width, 2 if stage and number == 0 else 1))
                before = width
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(before, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(self.stem(x)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class DoubleConv(nn.Sequential):
    """Two convolutions with BatchNorm."""

    def __init__(self, before: int, after: int):
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Down, and up again with what was seen on the way down."""

    def __init__(self, widths: tuple[int, ...] = (8, 16, 32)):
        super().__init__()
        self.downs = nn.ModuleList(DoubleConv(a, b) for a, b in zip((3, *widths[:-2]), widths[:-1], strict=True))
        self.pool = nn.MaxPool2d(2)
        self.bottom = nn.Sequential(DoubleConv(widths[-2], widths[-1]), nn.Dropout2d(0.1))
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.merges = nn.ModuleList(DoubleConv(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(widths[0], CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for up, merge in zip(self.ups, self.merges, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy over the output of a plain module, of each image or of each pixel."""
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def _classifier(name: str, family: str, shows: str = "", **options: Any) -> Entry:
    """A classifier of transformers, by the name of its family and the options of its config."""

    def make() -> nn.Module:
        config = getattr(transformers, f"{family}Config")(num_labels=CLASSES, **options)
        return getattr(transformers, f"{family}ForImageClassification")(config)

    return Entry(name, "transformers", make, classify, labelled(32), shows)


VISION: tuple[Entry, ...] = (
    _classifier("ViT", "ViT", **ENCODER),
    _classifier("DeiT", "DeiT", "a distillation token", **ENCODER),
    _classifier("Swin", "Swin", "shifted windows, drop path", image_size=32, patch_size=4, embed_dim=16, depths=(2, 2),
                num_heads=(2, 4), window_size=4, mlp_ratio=2.0, hidden_dropout_prob=0.1,
                attention_probs_dropout_prob=0.1, drop_path_rate=0.2),
    _classifier("ConvNeXt", "ConvNext", "layer scale, drop path", image_size=32, num_stages=2, hidden_sizes=(16, 32),
                depths=(2, 2), layer_scale_init_value=0.1, drop_path_rate=0.2),
    _classifier("BEiT", "Beit", "relative position bias, drop path", **ENCODER, drop_path_rate=0.2,
                use_relative_position_bias=True),
    _classifier("DINOv2", "Dinov2", "layer scale, drop path, a mask token without gradient", **ENCODER, mlp_ratio=2,
                drop_path_rate=0.2),
    Entry("CLIP", "transformers", clip, contrast, captioned, "two towers, a loss over all pairs of rows"),
    Entry("BLIP", "transformers", blip, own_loss, captions, "cross attention, tied embeddings, the model's own loss"),
    Entry("LLaVA", "transformers", llava, answer, prompted,
          "image features scattered into text, a last vision layer without use, ignored labels"),
    Entry("SegFormer", "transformers", segformer, segment, segmented,
          "features of all stages meet in the head, BatchNorm"),
    Entry("DETR", "transformers", detr, detect, lambda rows: boxed(rows, 6), "frozen BatchNorm and frozen parameters"),
    Entry("DETR with its own matched loss", "transformers", detr, detect_matched, lambda rows: boxed(rows, 3),
          "a matching on the host, which depends on data", float64=False),
    _classifier("ResNet", "ResNet", "BatchNorm", embedding_size=16, hidden_sizes=(32, 64), depths=(2, 2)),
    _classifier("EfficientNet", "EfficientNet", "BatchNorm, squeeze and excitation", image_size=32,
                width_coefficient=0.25, depth_coefficient=1.0, kernel_sizes=(3, 3, 5), in_channels=(32, 16, 24),
                out_channels=(16, 24, 40), strides=(1, 2, 2), num_block_repeats=(1, 2, 2), expand_ratios=(1, 6, 6),
                hidden_dim=320, dropout_rate=0.2, initializer_range=0.2),
    _classifier("MobileNetV2", "MobileNetV2", "BatchNorm, depthwise convolutions", image_size=32,
                depth_multiplier=0.25, finegrained_output=False, output_stride=16, classifier_dropout_prob=0.2),
    _classifier("RegNet", "RegNet", "BatchNorm, grouped convolutions", embedding_size=16, hidden_sizes=(16, 32),
                depths=(2, 2), groups_width=8),
    Entry("DenseNet", "torch", DenseNet, cross_entropy, labelled(16), "BatchNorm, dense concatenations"),
    Entry("U-Net", "torch", UNet, cross_entropy, segmented, "BatchNorm, skip connections"),
    Entry("PlainResNet", "torch", PlainResNet, cross_entropy, labelled(32), "BatchNorm, in-place ReLU and addition"),
)  # fmt: skip
