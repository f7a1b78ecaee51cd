"""The part of a bundled model that one tensor rank has, and plans with tensor ranks."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier, local

import pytest
import torch
from attrs import evolve
from panpipe.answers import bundled_models
from panpipe.answers.bundled_models import make
from panpipe.answers.tensor_ranks import model_of_rank
from panpipe.cli import main
from panpipe.core.analytic.model import model_work
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import read_plan
from panpipe.core.tensor_collectives import communicating
from panpipe.core.validation.validate import validate
from panpipe.simulators.run import simulate
from torch import nn

from ..support.models import sizes_of

pytest.importorskip("transformers")

HIDDEN, LAYERS, TOKENS = 128, 1, 32
SMALL = {
    "gpt": bundled_models._gpt2(LAYERS, 8, HIDDEN, vocab_size=1024),
    "llama": bundled_models._llama(LAYERS, 8, 4, HIDDEN, 256, vocab_size=1024),
    "mixtral": evolve(
        bundled_models._llama(LAYERS, 8, 4, HIDDEN, 256, vocab_size=1024, num_local_experts=4),
        classes=("MixtralConfig", "MixtralForCausalLM"),
    ),
}
ROTARY = ("llama", "mixtral")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, model in SMALL.items():
        monkeypatch.setitem(bundled_models.BUNDLED, name, model)


EACH = [pytest.param("gpt", marks=pytest.mark.slow), "llama"]


@cache
def work_of(name, tensor):
    model, step, batch = make(name, 1, TOKENS, tensor)
    return model, model_work(operators_of(capture_step(model, step, batch)))


@pytest.mark.parametrize("name", EACH)
def test_rank_has_its_part_of_weights_and_computation_and_two_all_reduces_a_block(name):
    whole, whole_work = work_of(name, 1)
    part, part_work = work_of(name, 2)
    weights = {n: p.shape for n, p in whole.named_parameters()}
    for parameter, tensor in part.named_parameters():
        kept = any(word in parameter for word in ("ln_", "norm", "wpe", "c_proj.bias"))
        vocabulary = any(word in parameter for word in ("wte", "embed_tokens", "lm_head"))
        if not vocabulary:
            assert tensor.numel() == weights[parameter].numel() // (1 if kept else 2), parameter
    hidden = TOKENS * HIDDEN * (2 if name == "llama" else 4)
    sizes = sizes_of(part_work, "forward_bytes")
    back = sizes_of(part_work, "backward_bytes")
    # Two a block and one of the embedding; the loss sums one number a token, and its maximum has no gradient.
    assert sizes == [hidden] * (2 * LAYERS + 1) + [TOKENS * 4] * 3
    assert back == [hidden] * (2 * LAYERS + 1) + [TOKENS * 4] * 2
    assert not sizes_of(whole_work, "forward_bytes")


def test_ranks_share_the_layers_of_an_encoder(monkeypatch):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": HIDDEN, "intermediate_size": 256}
    bert = evolve(bundled_models.BUNDLED["bert-large"], config=sizes)
    monkeypatch.setitem(bundled_models.BUNDLED, "bert", bert)
    whole, (part, step, batch) = make("bert", 1, TOKENS)[0], make("bert", 1, TOKENS, 2)
    layer, own = whole.bert.encoder.layer[0], part.bert.encoder.layer[0]
    weights = [m.weight for m in layer.modules() if isinstance(m, nn.Linear)]
    assert [m.weight.numel() for m in own.modules() if isinstance(m, nn.Linear)] == [w.numel() // 2 for w in weights]
    work = model_work(operators_of(capture_step(part, step, batch)))
    assert sizes_of(work, "forward_bytes").count(4 * TOKENS * HIDDEN) == 3


@pytest.mark.parametrize("name", EACH)
def test_saved_tensors_of_layer_norms_are_not_split(name):
    norms = [
        sum(
            each.saved_bytes
            for node, each in zip(found.graph.nodes, found.operators, strict=True)
            if "ln_1" in node.name or "input_layernorm" in node.name
        )
        for found in (work_of(name, 1)[1], work_of(name, 2)[1])
    ]
    assert norms[0] == norms[1] > 0


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("llama", 8, "'llama' has 4 groups of keys and values, which 8 tensor ranks cannot share equally"),
        ("gpt", 3, "'gpt' has 8 attention heads, which 3 tensor ranks cannot share equally"),
        ("vit-large", 2, "--tp splits the linear layers of language models .* and 'vit-large' is a ViT"),
    ],
)
def test_model_that_ranks_cannot_share_is_refused(name, tensor, said):
    with pytest.raises(RequestError, match=said):
        make(name, 1, None, tensor)


@pytest.mark.parametrize("name", EACH)
def test_ranks_that_share_tokens_scatter_and_gather_in_place_of_each_all_reduce(name):
    model, step, batch = make(name, 1, TOKENS, 2, by_tokens=True)
    work = model_work(operators_of(capture_step(model, step, batch)))
    hidden = TOKENS * HIDDEN * (2 if name == "llama" else 4)
    for exchanged, sums in (("forward_bytes", 3), ("backward_bytes", 2)):
        sizes = sizes_of(work, exchanged)
        assert sizes == [hidden // 2] * (2 * (2 * LAYERS + 1)) + [TOKENS * 4] * sums  # as an all-reduce of half of it
    norms = [
        sum(
            each.saved_bytes
            for node, each in zip(found.graph.nodes, found.operators, strict=True)
            if "ln_1" in node.name or "input_layernorm" in node.name
        )
        for found in (work, work_of(name, 2)[1])
    ]
    assert 0 < norms[0] < norms[1]


def test_scores_that_are_written_out_are_of_all_tokens(monkeypatch):
    gpt = bundled_models._gpt2(LAYERS, 8, HIDDEN, vocab_size=1024, attn_implementation="eager")
    monkeypatch.setitem(bundled_models.BUNDLED, "written out", gpt)
    captured = operators_of(capture_step(*make("written out", 1, TOKENS, 2, by_tokens=True)))
    assert (1, 4, TOKENS, TOKENS) in {tuple(getattr(value, "shape", ())) for value in captured.values.values()}


def plan(*options):
    return main(["plan", "--cluster", "2x4xA100-80GB", "--microbatches", "4", "--budget", "50", *options])


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--layers", "--sequence-parallel", "--tp-overlap", "all", "--kernels", "fused"),
    ],
)
def test_plan_with_tensor_ranks_is_simulated_as_predicted(tmp_path, capsys, monkeypatch, more):
    if more:
        monkeypatch.setitem(bundled_models.BUNDLED, "gpt", bundled_models._gpt2(4, 8, HIDDEN, vocab_size=1024))
    file = tmp_path / "plan.json"
    options = ("--model", "gpt", "--sequence", "64", "--tp", "2", "--mesh", "pp=2,dp=2", *more)
    assert plan(*options, "--schedule", "1f1b", "--out", str(file), "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    found = read_plan(file)
    assert (found.mesh.pipeline, found.mesh.data, found.mesh.tensor) == (2, 2, 2)
    assert (answer["tensor"], answer["data"]) == (2, 2)
    assert len(found.predicted.cluster.devices) == 8
    assert all(cost.reductions.ranks == 2 for cost in found.predicted.costs)
    validate(found)
    assert simulate(found).step_s == pytest.approx(found.predicted.step_s)
    assert main(["simulate", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == pytest.approx(answer["predicted_step_s"])


@pytest.mark.slow
def test_model_that_fits_with_no_tensor_ranks_is_infeasible(capsys):
    options = ("--model", "llama", "--sequence", "64", "--tp", "2", "--memory-limit", "1.1MB", "--mesh", "pp=4,dp=1")
    assert plan(*options) == 3
    assert "smallest change that fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "gpt", "--tp", "3"), "3 tensor ranks do not divide the 8 devices"),
        (("--model", "gpt", "--tp", "many"), "--tp is 'many': give a whole number of at least 1, or auto"),
        (("--model", "examples.gpt2:make", "--tp", "auto"), "--tp auto is for bundled models"),
        (("--model", "gpt", "--tp", "2", "--offload", "auto"), "--offload is given with --tp"),
        (("--model", "gpt", "--tp", "2", "--mesh", "pp=8"), "is for 8 devices and there are 4"),
    ],
)
def test_wrong_option_is_refused(options, said, capsys):
    assert plan(*options) == 2
    assert said in capsys.readouterr().err


class Ranks:
    """Threads that run the same program, with all-reduces between them."""

    def __init__(self, count):
        self.barrier, self.parts, self.number = Barrier(count), [None] * count, local()

    def all_reduce(self, part, operation):
        self.parts[self.number.value] = part
        self.barrier.wait()
        each = torch.stack(self.parts)
        self.barrier.wait()
        part.copy_(each.sum(0) if operation == "sum" else each.amax(0))

    def run(self, work):
        def one(rank):
            self.number.value = rank
            return work(rank)

        with ThreadPoolExecutor(len(self.parts)) as pool:
            return list(pool.map(one, range(len(self.parts))))


def rank_s_part(name, tensor, rank, shape):
    """The part of a whole weight that a rank holds: cut along the dimension in which the shapes differ."""
    if "c_attn" in name:  # query, key and value next to each other, each of them cut
        return torch.cat([third.chunk(2, -1)[rank] for third in tensor.chunk(3, -1)], -1)
    if "gate_up_proj" in name:  # of each expert
        return torch.cat([half.chunk(2, 1)[rank] for half in tensor.chunk(2, 1)], 1)
    for dimension, size in enumerate(shape):
        if size != tensor.shape[dimension]:
            return tensor.narrow(dimension, rank * size, size)
    return tensor


@pytest.mark.parametrize("name", SMALL)
def test_ranks_together_compute_the_loss_and_gradients_of_the_whole_model(name, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)  # losses are computed in float32, here in float64
    whole, step, _ = make(name, 2, 8)
    whole = whole.to_empty(device="cpu").double().eval()
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(0, whole.config.vocab_size, (2, 8))
    if name in ROTARY:  # its rotary table was on meta, too
        whole.model.rotary_emb = type(whole.model.rotary_emb)(whole.config)
    loss = step(whole, {"tokens": tokens})
    loss.backward()
    ranks = Ranks(2)
    parts = []
    for rank in range(2):
        part, part_step = model_of_rank(make(name, 2, 8)[0], 2, rank)
        part = part.to_empty(device="cpu").double().eval()
        if name in ROTARY:
            part.model.rotary_emb = type(whole.model.rotary_emb)(whole.config)
        given = dict(whole.named_parameters())
        for key, parameter in part.named_parameters():
            parameter.data.copy_(rank_s_part(key, given[key].detach(), rank, parameter.shape))
        parts.append((part, part_step))

    def work(rank):
        part, part_step = parts[rank]
        found = part_step(part, {"tokens": tokens})
        (found / 2).backward()  # of the mean of both ranks' losses
        return found.item()

    with communicating(ranks):
        losses = ranks.run(work)
    assert losses == pytest.approx([loss.item()] * 2, rel=1e-12)
    # Llama's norms compute in float32, whatever the dtype of the model.
    near = {"rtol": 1e-9, "atol": 1e-12} if name == "gpt" else {"rtol": 1e-4, "atol": 1e-7}
    for key, parameter in whole.named_parameters():
        own = [dict(part.named_parameters())[key].grad for part, _ in parts]
        if own[0].shape == parameter.shape:
            torch.testing.assert_close(own[0] + own[1], parameter.grad, **near)
        else:
            for rank in range(2):
                expected = rank_s_part(key, parameter.grad, rank, own[rank].shape)
                torch.testing.assert_close(own[rank], expected, **near)


def test_plan_with_two_kinds_of_ranks_is_saved_and_simulated(tmp_path, capsys):
    file = tmp_path / "plan.json"
    ranks = ("--tp", "2", "--ep", "2", "--mesh", "pp=2,dp=1", "--schedule", "1f1b")
    assert plan("--model", "mixtral", "--sequence", "64", *ranks, "--out", str(file), "--json") == 0
    predicted = json.loads(capsys.readouterr().out)["predicted_step_s"]
    kinds = [{each.over for each in cost.reductions.each} for cost in read_plan(file).predicted.costs]
    assert {"tensor", "experts"} in kinds
    assert main(["simulate", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == pytest.approx(predicted)
