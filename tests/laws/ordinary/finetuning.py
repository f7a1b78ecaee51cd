"""Fine-tuning of transformers models, as their users write it; small models with random weights."""
# ruff: noqa: B007, C408 -- as users write

import functools
from dataclasses import dataclass

import panpipe
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BatchEncoding,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    get_linear_schedule_with_warmup,
)

LLAMA = dict(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=32, use_cache=False, pad_token_id=0,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, output_router_logits=False)
BERT = dict(
    vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=32,
)  # fmt: skip
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def tokenized(count=3, rows=8, lengths=(6, 6, 6), words=40):
    """Padded batches, as of a tokenizer and a collator."""
    for number in range(count):
        length = lengths[number % len(lengths)]
        ids = torch.randint(1, words, (rows, length))
        mask = torch.arange(length) < torch.randint(2, length + 1, (rows, 1))
        ids = ids.masked_fill(~mask, 0)
        yield {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def texts(count=3, rows=8, length=6, words=40):
    ids = [torch.randint(words, (rows, length)) for _ in range(count)]
    return [{"input_ids": one, "labels": one} for one in ids]


def causal_loss(model, batch):
    return model(**batch).loss


# %% llama_with_lora | ranks, near=1e-5
model = LlamaForCausalLM(LlamaConfig(**LLAMA))
model = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
model.print_trainable_parameters()
batches = texts(4)
optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
pipe = panpipe.pipeline(model, causal_loss, batches[0], optimizer=optimizer, microbatches=4)
for step, batch in enumerate(tqdm(batches)):
    loss = pipe.step(batch)
    if step % 2 == 0:
        tqdm.write(f"{step}: {loss.item():.4f}")

# %% llama_full_fine_tuning | near=1e-5
model = LlamaForCausalLM(LlamaConfig(**LLAMA))
batches = texts()
scheduler = functools.partial(get_linear_schedule_with_warmup, num_warmup_steps=2, num_training_steps=10)
pipe = panpipe.pipeline(
    model,
    causal_loss,
    batches[0],
    optimizer=torch.optim.AdamW,
    microbatches=4,
    update=panpipe.Update(scheduler=scheduler, clip_norm=1.0),
)
progress_bar = tqdm(range(len(batches)))
model.train()
for batch in batches:
    outputs = pipe.step(batch)
    loss = outputs.item()
    progress_bar.update(1)

# %% llama_of_variable_lengths | near=1e-5, may_warn=microbatches of a new shape
model = LlamaForCausalLM(LlamaConfig(**LLAMA))
batches = [batch for length in (5, 7, 5, 7, 9, 5) for batch in texts(1, length=length)]
pipe = panpipe.pipeline(model, causal_loss, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)

# %% gpt2_with_evaluation_and_perplexity
config = GPT2Config(
    vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
model = GPT2LMHeadModel(config)
train, val = texts(4), texts(1)
pipe = panpipe.pipeline(model, causal_loss, train[0], optimizer=torch.optim.AdamW, microbatches=4)
for epoch in range(2):
    model.train()
    for batch in train[2 * epoch : 2 * epoch + 2]:
        loss = pipe.step(batch)
    model.eval()
    losses = [pipe.evaluate(batch) for batch in val]
    perplexity = torch.stack(losses).mean().exp()

# %% bert_classification_with_padding
model = BertForSequenceClassification(BertConfig(**BERT, **NO_DROPOUT, num_labels=3))
batches = [{**batch, "labels": torch.randint(3, (8,))} for batch in tokenized(4)]


def step(model, batch):
    outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
    return outputs.loss, {"accuracy": (outputs.logits.argmax(-1) == batch["labels"]).double().mean()}


pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)
    accuracy = pipe.metrics["accuracy"]

# %% bert_with_dropout | keyed
model = BertForSequenceClassification(BertConfig(**BERT, num_labels=3))
batches = [{**batch, "labels": torch.randint(3, (8,))} for batch in tokenized(3)]
pipe = panpipe.pipeline(model, causal_loss, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)


# %% bert_frozen_with_a_new_head
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = BertModel(BertConfig(**BERT, **NO_DROPOUT))
        self.bert.requires_grad_(False)
        self.out = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, input_ids, attention_mask):
        return self.out(self.bert(input_ids, attention_mask=attention_mask).pooler_output)


loss_fn = nn.CrossEntropyLoss()


def step(model, batch):
    preds = model(batch["input_ids"], batch["attention_mask"])
    return loss_fn(preds, batch["labels"])


model = Classifier()
batches = [{**batch, "labels": torch.randint(3, (8,))} for batch in tokenized(3)]
pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for epoch in range(2):
    total_loss = 0
    for batch in batches:
        loss = pipe.step(batch)
        total_loss += loss.item()

# %% t5_summaries
config = T5Config(
    vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0, pad_token_id=0,
    decoder_start_token_id=0, use_cache=False,
)  # fmt: skip
model = T5ForConditionalGeneration(config)
batches = [{**batch, "labels": torch.randint(1, 40, (8, 4))} for batch in tokenized(3)]
pipe = panpipe.pipeline(model, causal_loss, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)

# %% vit_images
model = ViTForImageClassification(
    ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=16,
              patch_size=8, num_labels=3, **NO_DROPOUT)
)  # fmt: skip
batches = [{"pixel_values": torch.randn(8, 3, 16, 16), "labels": torch.randint(3, (8,))} for _ in range(3)]
pipe = panpipe.pipeline(model, causal_loss, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)

# %% mixtral | fast, float32, near=1e-4
model = MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2))
batches = texts()
pipe = panpipe.pipeline(model, causal_loss, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)

# %% qwen3_moe | float32, near=1e-4
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**LLAMA, **EXPERTS, head_dim=8))
batches = texts()
pipe = panpipe.pipeline(model, causal_loss, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)

# %% olmoe_with_a_loss_of_its_router | float32, near=1e-4
options = dict(num_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.01)
model = OlmoeForCausalLM(OlmoeConfig(**LLAMA, **options))
batches = texts()
pipe = panpipe.pipeline(model, causal_loss, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)

# %% lora_of_the_attention_of_a_mixture | float32, near=1e-4
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **LLAMA, **EXPERTS, head_dim=8))
model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
batches = texts()
pipe = panpipe.pipeline(model, causal_loss, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in tqdm(batches):
    loss = pipe.step(batch)

# %% lora_of_all_layers_of_a_mixture | float32, near=1e-4
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **LLAMA, **EXPERTS, head_dim=8))
model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"))
batches = texts()
pipe = panpipe.pipeline(model, causal_loss, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in tqdm(batches):
    loss = pipe.step(batch)

# %% batch_encoding_of_a_tokenizer | near=1e-5, may_warn=relates
model = LlamaForCausalLM(LlamaConfig(**LLAMA))
batches = [BatchEncoding(batch) for batch in tokenized(3)]


def step(model, batch):
    outputs = model(**batch)
    return outputs.loss


pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)


# %% supervised_fine_tuning_of_answers | near=1e-5
@dataclass
class TrainingArguments:
    lr: float = 1e-3
    gradient_accumulation_steps: int = 2
    max_grad_norm: float = 1.0


args = TrainingArguments()
model = LlamaForCausalLM(LlamaConfig(**LLAMA))
model.gradient_checkpointing_enable()


def step(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:]
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100)
    return loss, (labels != -100).sum()


batches = list(tokenized(4))
optimizer = functools.partial(torch.optim.AdamW, lr=args.lr)
pipe = panpipe.pipeline(
    model, step, batches[0], optimizer=optimizer, microbatches=4, update=panpipe.Update(clip_norm=args.max_grad_norm)
)
for global_step, batch in enumerate(batches):
    loss = pipe.step(batch, update=(global_step + 1) % args.gradient_accumulation_steps == 0)


# %% trainer_that_pops_the_labels | near=1e-5
class Trainer:
    def __init__(self, model, label_smoothing=0.1):
        self.model, self.label_smoothing, self.state = model, label_smoothing, {"epoch": 0}

    def compute_loss(self, model, inputs, return_outputs=False):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=self.label_smoothing)
        return (loss, outputs) if return_outputs else loss

    def train(self, batches):
        pipe = panpipe.pipeline(self.model, self.compute_loss, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
        for epoch in range(2):
            self.state["epoch"] = epoch
            for batch in batches:
                pipe.step(batch)


Trainer(LlamaForCausalLM(LlamaConfig(**LLAMA))).train(texts(2))
