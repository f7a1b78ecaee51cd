"""Diffusion models from diffusers."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    UNet2DModel,
)
from torch import Tensor, nn
from torch.nn import functional as F

from .entry import Entry, classes, generator, images

CLASSES = 10
STEPS = 1000
SIZE = 8
TEXT = 6
WIDTH = 16
KEPT = torch.cumprod(1 - torch.linspace(1e-4, 0.02, STEPS), dim=0)
SCHEDULER = DDPMScheduler(num_train_timesteps=STEPS)

Batch = dict[str, Tensor]


def noised(rows: int, channels: int, size: int) -> Batch:
    """Latents, noise, and a timestep for each row."""
    draw = generator()
    return {
        "latents": torch.randn(rows, channels, size, size, generator=draw),
        "noise": torch.randn(rows, channels, size, size, generator=draw),
        "timesteps": torch.randint(0, STEPS, (rows,), generator=draw),
    }


def text(rows: int) -> Batch:
    """The states of a text encoder, and their pooled form."""
    draw = generator()
    return {
        "encoder_hidden_states": torch.randn(rows, TEXT, WIDTH, generator=draw),
        "pooled": torch.randn(rows, WIDTH, generator=draw),
    }


def flowing(rows: int) -> Batch:
    """Latents, noise, text, and a time between 0 and 1 for each row."""
    batch = {**noised(rows, 4, SIZE), **text(rows), "sigmas": torch.rand(rows, generator=generator())}
    del batch["timesteps"]
    return batch


def add_noise(batch: Batch) -> Tensor:
    """The latents with the noise of their timesteps, written by hand."""
    kept = KEPT.to(batch["latents"])[batch["timesteps"]].view(-1, 1, 1, 1)
    return kept.sqrt() * batch["latents"] + (1 - kept).sqrt() * batch["noise"]


def unet2d() -> nn.Module:
    return UNet2DModel(
        sample_size=16, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), block_out_channels=(16, 32), layers_per_block=1,
        norm_num_groups=8, dropout=0.1,
    )  # fmt: skip


def unet2d_step(model: nn.Module, batch: Batch) -> Tensor:
    """Predict the noise."""
    prediction = model(add_noise(batch), batch["timesteps"]).sample
    return F.mse_loss(prediction, batch["noise"])


def unet2d_condition() -> nn.Module:
    return UNet2DConditionModel(
        sample_size=SIZE, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), block_out_channels=(16, 32), layers_per_block=1,
        norm_num_groups=8, cross_attention_dim=WIDTH, attention_head_dim=2, dropout=0.1,
    )  # fmt: skip


def unet2d_condition_step(model: nn.Module, batch: Batch) -> Tensor:
    """Predict the noise from the text; a scheduler adds it."""
    noisy = SCHEDULER.add_noise(batch["latents"], batch["noise"], batch["timesteps"])
    prediction = model(noisy, batch["timesteps"], batch["encoder_hidden_states"]).sample
    return F.mse_loss(prediction, batch["noise"])


def autoencoder() -> nn.Module:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16), norm_num_groups=4, sample_size=16,
    )  # fmt: skip


def autoencoder_step(model: Any, batch: Batch) -> Tensor:
    """Reconstruct the images from a sample of the posterior."""
    posterior = model.encode(batch["pixel_values"]).latent_dist
    reconstruction = model.decode(posterior.sample()).sample
    return F.mse_loss(reconstruction, batch["pixel_values"]) + 1e-3 * posterior.kl().mean()


def dit() -> nn.Module:
    return DiTTransformer2DModel(
        sample_size=SIZE, in_channels=4, out_channels=8, num_layers=3, num_attention_heads=2, attention_head_dim=8,
        num_embeds_ada_norm=CLASSES, dropout=0.1,
    )  # fmt: skip


def dit_step(model: nn.Module, batch: Batch) -> Tensor:
    """Predict the noise from the class; the other half of the channels is the variance, which is left alone."""
    prediction = model(add_noise(batch), timestep=batch["timesteps"], class_labels=batch["labels"]).sample
    noise, _ = prediction.chunk(2, dim=1)
    return F.mse_loss(noise, batch["noise"])


def pixart() -> nn.Module:
    return PixArtTransformer2DModel(
        sample_size=SIZE, num_layers=2, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        caption_channels=WIDTH, dropout=0.1,
    )  # fmt: skip


def masked(rows: int) -> Batch:
    """Latents and noise, and text of different lengths."""
    lengths = torch.randint(1, TEXT + 1, (rows, 1), generator=generator())
    return {**noised(rows, 4, SIZE), **text(rows), "attention_mask": (torch.arange(TEXT) < lengths).long()}


def pixart_step(model: nn.Module, batch: Batch) -> Tensor:
    """Predict the noise from text with padding."""
    prediction = model(
        add_noise(batch),
        encoder_hidden_states=batch["encoder_hidden_states"],
        encoder_attention_mask=batch["attention_mask"],
        timestep=batch["timesteps"],
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    ).sample
    return F.mse_loss(prediction.chunk(2, dim=1)[0], batch["noise"])


def sd3() -> nn.Module:
    return SD3Transformer2DModel(
        sample_size=SIZE, in_channels=4, out_channels=4, num_layers=3, num_attention_heads=2, attention_head_dim=8,
        joint_attention_dim=WIDTH, caption_projection_dim=16, pooled_projection_dim=WIDTH, pos_embed_max_size=SIZE,
        dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip


def sd3_step(model: nn.Module, batch: Batch) -> Tensor:
    """Predict the velocity of a straight flow from latents to noise."""
    sigmas = batch["sigmas"].view(-1, 1, 1, 1)
    prediction = model(
        hidden_states=(1 - sigmas) * batch["latents"] + sigmas * batch["noise"],
        timestep=batch["sigmas"] * STEPS,
        encoder_hidden_states=batch["encoder_hidden_states"],
        pooled_projections=batch["pooled"],
        return_dict=False,
    )[0]
    return F.mse_loss(prediction, batch["noise"] - batch["latents"])


def flux() -> nn.Module:
    return FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def pack(latents: Tensor) -> Tensor:
    """Patches of two by two pixels as tokens."""
    rows, channels, height, width = latents.shape
    patches = latents.view(rows, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(rows, (height // 2) * (width // 2), channels * 4)


def flux_step(model: nn.Module, batch: Batch) -> Tensor:
    """Predict the velocity of a straight flow over packed latents."""
    latents, noise, sigmas = pack(batch["latents"]), pack(batch["noise"]), batch["sigmas"]
    side = torch.arange(SIZE // 2, dtype=latents.dtype, device=latents.device)
    places = torch.cartesian_prod(side, side)
    prediction = model(
        hidden_states=(1 - sigmas[:, None, None]) * latents + sigmas[:, None, None] * noise,
        timestep=sigmas,
        guidance=torch.full_like(sigmas, 3.5),
        pooled_projections=batch["pooled"],
        encoder_hidden_states=batch["encoder_hidden_states"],
        txt_ids=latents.new_zeros(TEXT, 3),
        img_ids=F.pad(places, (1, 0)),
        return_dict=False,
    )[0]
    return F.mse_loss(prediction, noise - latents)


DIFFUSION: tuple[Entry, ...] = (
    Entry("UNet2D", "diffusers", unet2d, unet2d_step, lambda rows: noised(rows, 3, 16), "long skip connections"),
    Entry("UNet2DCondition", "diffusers", unet2d_condition, unet2d_condition_step,
          lambda rows: {**noised(rows, 4, SIZE), **text(rows)},
          "cross attention, long skip connections, a scheduler outside the model"),
    Entry("AutoencoderKL", "diffusers", autoencoder, autoencoder_step, lambda rows: {"pixel_values": images(rows, 16)},
          "a random sample inside the step, methods other than forward"),
    Entry("DiT", "diffusers", dit, dit_step, lambda rows: {**noised(rows, 4, SIZE), "labels": classes(rows, CLASSES)},
          "adaptive norms, dropped classes, an embedding used by all parts"),
    Entry("PixArt", "diffusers", pixart, pixart_step, masked,
          "one adaptive norm for all blocks, masked cross attention"),
    Entry("SD3", "diffusers", sd3, sd3_step, flowing, "two streams"),
    Entry("Flux", "diffusers", flux, flux_step, flowing, "two streams, then one; rotary embeddings"),
)  # fmt: skip
