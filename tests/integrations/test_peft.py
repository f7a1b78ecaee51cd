"""LoRA of PEFT with frozen base weights, against eager PyTorch; adapters go both ways."""

import copy

import panpipe
import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.integrations.peft import save_adapter
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from ..support.launch import results

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]


def base():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def step(model, batch):
    return model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss


def optimizer(named):
    return torch.optim.SGD(named, lr=0.5)


def test_lora_trains_as_in_one_process_and_its_adapter_is_read_by_peft(tmp_path):
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base(), lora)
    alone = copy.deepcopy(model)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    batch = {"input_ids": torch.randint(61, (8, 12))}
    reference = optimizer([p for p in alone.parameters() if p.requires_grad])
    with panpipe.pipeline(
        model, step, batch, optimizer=optimizer, microbatches=4, plan=panpipe.Auto(schedule="1f1b", max_chunks=1),
        run=panpipe.Run(progress=False),
    ) as pipe:  # fmt: skip
        for index in range(3):
            wanted = panpipe.reference_step(alone, step, batch, microbatches=4, index=index)
            reference.step()
            assert pipe.step(batch).item() == pytest.approx(wanted.item(), rel=1e-6)
        save_adapter(pipe, tmp_path)
    expected = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, frozen[name]) if name in frozen else torch.allclose(parameter, expected[name])
    again = PeftModel.from_pretrained(base(), tmp_path)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name


def test_save_adapter_refuses_other_models(tmp_path):
    model, batch = base(), {"input_ids": torch.randint(61, (4, 8))}
    with (
        panpipe.pipeline(model, step, batch, microbatches=2, plan="1f1b", run=panpipe.Run(progress=False)) as pipe,
        pytest.raises(RequestError, match=r"LlamaForCausalLM, not a PeftModel: use pipe\.save"),
    ):
        save_adapter(pipe, tmp_path)


def test_save_adapter_returns_on_all_ranks_when_the_first_has_written(tmp_path):
    for found in results("adapter", tmp_path, 2):
        assert found["files"] == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
        assert "cannot write the adapter" in found["failure"]
        assert "No space left on device" in found["failure"]
