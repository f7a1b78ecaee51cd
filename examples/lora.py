"""Train a LoRA adapter of PEFT on a model with frozen base weights, as a pipeline.

    python examples/lora.py
    torchrun --nproc-per-node 2 examples/lora.py

The adapter is written as ``PeftModel.save_pretrained`` writes it. Weights are random, so nothing is downloaded.
"""

import argparse

import panpipe
import torch
from panpipe.integrations.peft import save_adapter
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def make_model() -> torch.nn.Module:
    """A small Llama with frozen weights, and LoRA on the projections of its attention."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), lora)


def step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """An ordinary training step."""
    return model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="out/lora", help="folder of the adapter")
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    arguments = parser.parse_args()
    draw = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(16, (16, 32), generator=draw)} for _ in range(arguments.steps)]
    with panpipe.pipeline(
        make_model(), step, batches[0], optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2), microbatches=4,
        plan="1f1b", run=panpipe.Run(progress=False),
    ) as pipe:  # fmt: skip
        for number, batch in enumerate(batches):
            loss = pipe.step(batch)
            if number % 5 == 0:
                print(f"step {number}: loss {loss.item():.4f}", flush=True)
        save_adapter(pipe, arguments.out)


if __name__ == "__main__":
    main()
