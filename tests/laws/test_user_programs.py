"""Programs as their users write them, and the refusals that they meet, with four microbatches.

The plan is the measured cut of 1F1B: laws/test_ordinary.py trains by all schedules that the default call compares.
"""

import copy
import re

import panpipe
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao import quantization

from .grouped import grouped

MICROBATCHES = 4


def pipeline(model, step, batch, lr=1e-3, **more):
    return panpipe.pipeline(
        model,
        step,
        batch,
        **grouped(
            optimizer=lambda named: torch.optim.SGD(named, lr=lr),
            microbatches=MICROBATCHES,
            progress=False,
            schedule="1f1b",
            max_chunks=1,
            **more,
        ),
    )


def trained(model, step, batch, steps=2, tolerance=1e-5, **more):
    """Train some steps, and compare losses and parameters with those of one process."""
    alone = copy.deepcopy(model)
    pipe = pipeline(model, step, batch, **more)
    optimizer = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad])
    rows = [torch.utils._pytree.tree_map(lambda t, i=i: t.chunk(MICROBATCHES)[i], batch) for i in range(MICROBATCHES)]
    for _ in range(steps):
        loss = sum(step(alone, part) for part in rows) / MICROBATCHES
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(pipe.step(batch), loss.detach().squeeze(), rtol=tolerance, atol=tolerance)
    for (name, mine), theirs in zip(model.state_dict().items(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    pipe.close()


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip
EXPERTS = {
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
    "DeepseekV3": {
        "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
    },
}  # fmt: skip


@pytest.mark.slow  # laws/test_ordinary.py trains Mixtral, OLMoE and Qwen3's mixture by the default call
@pytest.mark.parametrize("name", EXPERTS)
def test_mixture_of_experts_trains(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, **EXPERTS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    ids = torch.randint(2, 64, (8, 16))
    trained(model, lambda model, batch: model(**batch).loss, {"input_ids": ids, "labels": ids}, tolerance=1e-4)


class Drawn(nn.Module):
    """Draws which entries stay from probabilities that it computes, and counts them as integers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.a(x)
        kept = torch.bernoulli(torch.sigmoid(hidden).detach())
        order = kept.cumsum(-1, dtype=torch.int64)
        return self.b(hidden * kept) * order


def test_draws_and_integers_from_computed_values_train():
    torch.manual_seed(0)
    batch = torch.randn(16, 8)
    pipe = pipeline(Drawn(), lambda model, batch: model(batch).square().mean(), batch)
    assert pipe.step(batch) > pipe.step(batch) > 0


def reconstruct(model, batch):
    return F.mse_loss(model(batch), batch)


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_wrapped_model_trains_under_its_own_names(wrap, tmp_path):
    torch.manual_seed(0)
    plain, batch = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(16, 8)
    pipe = pipeline(wrap(copy.deepcopy(plain)), reconstruct, batch)
    loss = pipe.step(batch)
    assert set(pipe.state_dict()["model"]) == set(plain.state_dict())
    pipe.checkpoint(tmp_path / "one")
    other = pipeline(plain, reconstruct, batch)
    assert torch.equal(other.step(batch), loss)
    other.resume(tmp_path / "one")


def test_state_that_is_not_of_a_pipeline_is_refused_with_the_fix():
    batch, model = torch.randn(16, 8), nn.Linear(8, 8)
    pipe = pipeline(model, reconstruct, batch)
    for state in (model.state_dict(), {"model": model.state_dict(), "epoch": 3}):
        with pytest.raises(panpipe.RequestError, match=r"no state of a pipeline.*model\.load_state_dict\(.*weights="):
            pipe.load_state_dict(state)
    state = pipe.state_dict()
    state["model"] = {f"module.{name}": tensor for name, tensor in state["model"].items()}
    with pytest.raises(panpipe.RequestError, match=r"its names differ by '_orig_mod\.' or 'module\.': rename them"):
        pipe.load_state_dict(state)


class Scaled(nn.Module):
    """Two towers with a logit scale, as CLIP."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return F.cosine_similarity(self.image(x), self.text(x)) * self.logit_scale.exp()


@pytest.mark.parametrize("on_data", [pytest.param(False, marks=pytest.mark.slow), True])
def test_clamped_logit_scale_trains(on_data):
    torch.manual_seed(0)
    model, batch = Scaled(), torch.randn(16, 8)

    def clamped(model, batch):
        if on_data:
            model.logit_scale.data.clamp_(2.05, 4.6)
        else:
            with torch.no_grad():
                model.logit_scale.clamp_(min=2.05)
        return -model(batch).mean()

    trained(model, clamped, batch, steps=3)
    pipe = pipeline(model, clamped, batch)
    before = model.logit_scale.item()
    torch.testing.assert_close(pipe.evaluate(batch), clamped(copy.deepcopy(model).eval(), batch).detach())
    assert before < 2.05  # evaluation and steps limit it, and the pipeline's start does not


def test_parameter_that_is_written_otherwise_is_refused_with_its_replacement():
    torch.manual_seed(0)
    model, batch = Scaled(), torch.randn(16, 8)
    alone = copy.deepcopy(model)

    def decayed(model, batch):
        with torch.no_grad():
            model.logit_scale.mul_(0.9)
        return -model(batch).mean()

    with pytest.raises(panpipe.RequestError, match="writes parameter 'logit_scale' in place") as refused:
        pipeline(model, decayed, batch)
    replacement = re.search(r"panpipe\.weights\.on_parameters\(pipe, .*? else None\)", str(refused.value)).group()
    pipe = pipeline(model, lambda model, batch: -model(batch).mean(), batch)
    pipe.step(batch)
    eval(replacement, {"pipe": pipe, "panpipe": panpipe})
    loss = -alone(batch).mean()
    loss.backward()
    torch.testing.assert_close(model.logit_scale, 0.9 * (alone.logit_scale - 1e-3 * alone.logit_scale.grad))


def test_forward_that_needs_the_whole_model_is_refused_with_what_to_do():
    batch, model = torch.randn(16, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    pipe = pipeline(model, reconstruct, batch)

    def grown(model, x):
        while model(x).abs().max() < 1:
            x = x + x
        return x

    with pytest.raises(panpipe.RequestError, match=r"one stage must hold both.*model\.generate.*pipe\.save"):
        pipe.forward(batch, grown)


def test_generation_is_refused_before_anything_is_traced():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=16))
    batch = torch.randint(0, 11, (4, 5))
    pipe = pipeline(model, lambda model, x: model(input_ids=x, labels=x).loss, batch)
    with pytest.raises(panpipe.RequestError, match=r"test_user_programs.*in one process, or pipe\.save\(folder\)"):
        pipe.forward(batch, lambda model, x: model.generate(x, max_new_tokens=4))


class Quantised(nn.Module):
    """Trained with fake quantisation, whose observers take their shape in the first forward."""

    def __init__(self):
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.a, self.b, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8 * 16, 10)

    def forward(self, x):
        x = F.relu(self.b(F.relu(self.a(self.quant(x)))))
        return self.dequant(self.head(x.flatten(1)))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:.*reduce_range")
def test_quantisation_aware_training():
    torch.manual_seed(0)
    model = Quantised().train()
    model.qconfig = quantization.get_default_qat_qconfig("x86")
    quantization.prepare_qat(model, inplace=True)
    batch = torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
    trained(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch, tolerance=1e-4)


class WithJacobian(nn.Module):
    """A network and its Jacobian, as for a differential equation."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.net(x), torch.func.vmap(torch.func.jacrev(self.net))(x)


def test_jacobians_train_in_the_step_and_in_a_module():
    torch.manual_seed(0)
    batch, net = torch.randn(16, 2), nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def in_the_step(model, x):
        return model(x).square().mean() + torch.func.vmap(torch.func.jacrev(model))(x).square().mean()

    def in_a_module(model, x):
        value, slope = model[1](model[0](x))
        return slope.square().mean() + value.square().mean()

    trained(net, in_the_step, batch)
    trained(nn.Sequential(nn.Linear(2, 2), WithJacobian()), in_a_module, batch)


LAYERS = (nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
ROWS = torch.randn(16, 8)
WRONG = {
    "a list of layers": ({"model": list(LAYERS)}, r"model is a list: give an instance of a torch\.nn\.Module"),
    "a scripted part": (
        {"model": nn.Sequential(nn.Linear(8, 8), torch.jit.ScriptModule())},
        r"module '1' is a ScriptModule, whose operators cannot be captured",
    ),
    "a class": ({"model": nn.Linear}, r"model is the class Linear: give an instance"),
    "a step without the model": ({"step": lambda batch: batch}, r"cannot be called as step\(model, batch\)"),
    "a step that is none": ({"step": None}, r"step is None: give a function step\(model, batch\)"),
    "a loader": (
        {"batch": torch.utils.data.DataLoader([1])},
        r"a DataLoader and not a batch: give one",
    ),
    "a flag for recompute": ({"recompute": True}, r"recompute is True: give 'none', 'all'"),
    "shards of one replica": ({"shard": "optimizer"}, r"the mesh has one replica: .*leave shard out"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument_is_refused_with_the_fix(name):
    changed, message = WRONG[name]
    given = {"model": nn.Sequential(*LAYERS), "step": reconstruct, "batch": ROWS, **changed}
    with pytest.raises(panpipe.RequestError, match=message):
        pipeline(given.pop("model"), given.pop("step"), given.pop("batch"), **given)


def test_names_of_a_module_or_an_optimizer_are_answered_with_the_pipelines():
    pipe = pipeline(nn.Sequential(*LAYERS), reconstruct, ROWS)
    with pytest.raises(AttributeError, match=r"'zero_grad': pipe\.step"):
        pipe.zero_grad()
    assert not hasattr(pipe, "optimizer")
    with pytest.raises(panpipe.RequestError, match="cannot be copied or pickled"):
        copy.deepcopy(pipe)


HIDDEN = torch.zeros(1, 16, 8)


def test_state_of_the_whole_batch_is_refused_with_the_microbatch():
    with pytest.raises(
        panpipe.RequestError, match=r"hidden.* size.*\(for a microbatch of 4×3×8\)|with 3 of 16 samples"
    ):
        pipeline(
            nn.ModuleList([nn.Linear(8, 8), nn.GRU(8, 8, batch_first=True)]),
            lambda model, x: model[1](model[0](x), HIDDEN)[0].square().mean(),
            torch.randn(16, 3, 8),
            batch_dims=0,
        )


class Sized(nn.Module):
    """Keeps the size of its last input in a buffer that it assigns."""

    def __init__(self):
        super().__init__()
        self.register_buffer("size", torch.tensor([4]))
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        self.size = torch.tensor(x.shape[-1:])
        return self.linear(x)


def test_buffer_that_is_assigned_before_a_line_that_needs_a_value():
    def checked(model, batch):
        loss = F.mse_loss(model(batch), batch).reshape(1)  # losses of shape (1,) are accepted, too
        assert batch.max() < 100
        return loss

    torch.manual_seed(0)
    trained(nn.Sequential(nn.Linear(8, 8), Sized(), nn.Linear(8, 8)), checked, torch.randn(16, 8))


def test_clipped_gradients_of_each_sample_of_convolutions():
    def private(model, batch):
        def loss(params, image, label):
            return F.cross_entropy(torch.func.functional_call(model, params, (image[None],)), label[None])

        params = dict(model.named_parameters())
        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, *batch)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        factor = (1 / norms).clamp(max=1) / len(norms)
        return sum((torch.einsum("i,i...", factor, g.detach()) * params[name]).sum() for name, g in gradients.items())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4))
    trained(model, private, (torch.randn(8, 3, 8, 8), torch.randint(4, (8,))), tolerance=1e-4)


class Proposals(nn.Module):
    """Returns the rows with a positive score, as the first half of a detector does."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(8, 1)

    def forward(self, x):
        kept = [row for row, score in zip(x, self.score(x), strict=True) if score.item() > 0]
        return torch.stack(kept) if kept else x[:0]


class Head(nn.Module):
    """A detector's head: its loss is a method of its own, which looks at values."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)

    def compute_loss(self, found, x):
        return F.l1_loss(found, x) if x.mean() > 0 else F.mse_loss(found, x)


class Detector(nn.Module):
    def __init__(self, proposals):
        super().__init__()
        self.backbone, self.proposals, self.head = nn.Linear(8, 8), proposals, Head()

    def forward(self, x):
        x = self.proposals(self.backbone(x))
        return self.head.compute_loss(self.head(x), x.detach()) + x.sum() / 100


@pytest.mark.filterwarnings("ignore:.*relates samples of the batch")
@pytest.mark.parametrize("proposals", [Proposals, nn.Identity])
def test_detector_trains(proposals):
    torch.manual_seed(0)
    trained(Detector(proposals()), lambda model, batch: model(batch), torch.randn(32, 8))


class Noted(nn.Linear):
    """Counts its calls on its parameter, as libraries for gradients of each sample do."""

    def forward(self, x):
        self.weight.calls += 1
        return super().forward(x)


def test_forward_that_reads_what_is_noted_on_a_parameter():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 8), Noted(8, 8), nn.Linear(8, 8)), torch.randn(16, 8)
    model[1].weight.calls = 0
    loss = reconstruct(model, batch).detach()
    torch.testing.assert_close(pipeline(model, reconstruct, batch).step(batch), loss)
    assert model[1].weight.calls == 1


def test_texts_of_samples_are_refused_with_what_to_do():
    def read(model, batch):
        lengths = torch.tensor([float(len(word)) for word in batch["words"]])
        return F.mse_loss(model(batch["image"])[:, 0], lengths)

    batch = {"image": torch.randn(8, 8), "words": ["cat", "dogs", "a", "pipe", "pan", "to", "stage", "no"]}
    with pytest.raises(panpipe.RequestError, match=r"share the texts of the batch, such as batch\['words'\]\[0\]"):
        pipeline(nn.Linear(8, 1), read, batch)


class Masked(nn.Module):
    """Masks by .data what an earlier layer has saved for its backward, as Tacotron 2 does."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.first(x)
        result = hidden + self.second(hidden)
        if x.max() > 100:
            result = result * 2
        hidden.data.masked_fill_(x > 0, 0.0)
        return hidden + result


def test_data_of_an_earlier_tensor_that_is_written_after_a_line_that_needs_a_value_is_refused():
    with pytest.raises(
        panpipe.RequestError, match=r"masked_fill_ writes, by \.data.*use a function that returns a new"
    ):
        pipeline(Masked(), reconstruct, torch.randn(16, 8))
