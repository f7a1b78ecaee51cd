"""``panpipe plan`` for clusters as people build them: groups of replicas, context ranks, expert ranks, FP8, layers that
recompute. Every plan is also simulated by the command, and read again from its file."""

import json

import panpipe
import pytest
import torch
from attrs import evolve
from panpipe.cli import main
from panpipe.core.plan.plan import read_plan
from panpipe.core.validation.validate import validate
from torch import nn

from ..support.plans import orders, plan_of

LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 2048, "num_attention_heads": 16,
         "num_key_value_heads": 8, "intermediate_size": 5504, "vocab_size": 8192,
         "max_position_embeddings": 32768}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
COMMON = ("--batch", "16", "--microbatches", "8", "--schedule", "1f1b", "--recompute", "none", "--budget", "20")


def planned(capsys, tmp_path, *options, model=LLAMA, cluster="2x8xH100", sequence=2048):
    """The answer of the command as JSON; the plan file is sound."""
    file, out = tmp_path / "config.json", tmp_path / "plan.json"
    file.write_text(json.dumps(model), encoding="utf-8")
    common = [*COMMON, "--sequence", str(sequence), "--cluster", cluster, "--out", str(out), "--json"]
    status = main(["plan", "--model", str(file), *common, *options])
    found = capsys.readouterr()
    if status:
        return found.err
    validate(read_plan(out))
    return json.loads(found.out)


def test_groups_of_replicas_share_within_a_node(tmp_path, capsys):
    mesh = ("--mesh", "pp=1,dp=16", "--shard")
    batch = ("--batch", "16", "--microbatches", "16")
    all_share, groups = (planned(capsys, tmp_path, *mesh, level, *batch) for level in ("parameters", "parameters:8"))
    assert groups["sharing"] == 8
    assert groups["shard"] == ["parameters"] * len(groups["shard"])
    assert groups["peak_memory_bytes"][0] > all_share["peak_memory_bytes"][0]
    assert groups["predicted_step_s"] == pytest.approx(groups["simulated_step_s"])
    assert "no mesh has a multiple of 5 replicas" in planned(capsys, tmp_path, *mesh, "parameters:5", *batch)
    assert "how many replicas share, at least 2" in planned(capsys, tmp_path, *mesh, "parameters:1", *batch)


def test_context_ranks_share_the_tokens_of_long_samples(tmp_path, capsys):
    long = {"sequence": 32768, "cluster": "8xH100"}
    one = planned(capsys, tmp_path, "--mesh", "pp=1,dp=1", cluster="1xH100", sequence=32768)
    zigzag, contiguous = (
        planned(capsys, tmp_path, "--mesh", "pp=1,dp=1", "--cp", "8", "--cp-order", order, **long)
        for order in ("zigzag", "contiguous")
    )
    assert zigzag["context"] == 8
    assert 1.0 <= zigzag["predicted_step_s"] / (one["predicted_step_s"] / 8) < 1.3
    # The last of eight ranks has 7.5 of 8 blocks, and on average there are 4; a part of the step is attention.
    assert 1.1 < contiguous["predicted_step_s"] / zigzag["predicted_step_s"] < 1.9
    saved = [answer["memory_at_peak_bytes"][0]["saved"] for answer in (one, zigzag)]
    assert saved[1] == pytest.approx(saved[0] / 8, rel=0.02)
    tokens = [answer["throughput"]["tokens_per_s"] * answer["predicted_step_s"] for answer in (one, zigzag)]
    assert tokens[0] == pytest.approx(tokens[1])
    assert "cannot share 2048 tokens" in planned(capsys, tmp_path, "--cp", "3", cluster="3xH100")


@pytest.mark.slow
def test_ring_messages_cross_the_links_where_computation_does_not_cover_them(tmp_path, capsys):
    options = ("--mesh", "pp=1,dp=1", "--cp", "2")
    near, far = (planned(capsys, tmp_path, *options, cluster=cluster) for cluster in ("2xH100", "2x1xH100:nic=10GbE"))
    assert near["tensor_reduction_share"] < 0.01
    assert far["tensor_reduction_share"] > 0.2
    assert far["simulated_step_s"] == pytest.approx(far["predicted_step_s"])


def test_expert_ranks_share_the_experts(tmp_path, capsys):
    options = {"model": MIXTRAL, "cluster": "8xH100"}
    alone, shared = (planned(capsys, tmp_path, "--mesh", mesh, *ep, **options)
                     for mesh, ep in (("pp=1,dp=8", ()), ("pp=1,dp=1", ("--ep", "8", "--batch", "64"))))  # fmt: skip
    assert shared["experts"] == 8
    assert 0 < shared["tensor_reduction_share"] < 0.5
    state = [answer["memory_at_peak_bytes"][0] for answer in (alone, shared)]
    assert state[1]["parameters"] < state[0]["parameters"] / 4
    assert "cannot share equally: give --ep a divisor of 8" in planned(
        capsys, tmp_path, "--ep", "3", "--batch", "24", "--cluster", "3xH100", **options
    )
    assert "has no experts" in planned(capsys, tmp_path, "--ep", "8", "--batch", "64", cluster="8xH100")


def test_products_of_layers_are_faster_in_fp8(tmp_path, capsys):
    mesh = ("--mesh", "pp=1,dp=8", "--kernels", "fused", "--dtype")
    half, eighth = (planned(capsys, tmp_path, *mesh, dtype, cluster="8xH100") for dtype in ("bf16", "fp8"))
    assert 0.5 < eighth["predicted_step_s"] / half["predicted_step_s"] < 0.97
    assert "states no rate for matrix products in fp8" in planned(capsys, tmp_path, *mesh, "fp8", cluster="8xA100-80GB")


def test_each_nth_layer_recomputes(tmp_path, capsys):
    mesh = ("--mesh", "pp=1,dp=8", "--recompute")
    none, third, each = (
        planned(capsys, tmp_path, *mesh, what, cluster="8xH100") for what in ("none", "every:3", "every:1")
    )
    steps, saved = [
        [answer[key] for answer in (none, third, each)] for key in ("predicted_step_s", "peak_memory_bytes")
    ]
    assert steps == sorted(steps)
    assert 1.2 < steps[2] / steps[0] < 1.45
    assert saved[0] > saved[1] > saved[2]
    assert third["recompute_within"] == "every:3"
    assert read_plan(tmp_path / "plan.json").memory.within == "every:1"


@pytest.mark.parametrize(
    ("mesh", "memory", "option"),
    [({"context": 2}, {}, "--cp"), ({"tensor": 2, "experts": 2}, {}, "--ep"),
     ({"sharing": 2}, {}, "a number in --shard"), ({}, {"within": "every:2"}, "--recompute every:2"),
     ({}, {"within": "attention"}, "--recompute attention")],
)  # fmt: skip
def test_plan_that_is_simulated_alone_does_not_train(mesh, memory, option):
    plan = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1))
    plan = evolve(plan, mesh=evolve(plan.mesh, **mesh), memory=evolve(plan.memory, **memory))
    with pytest.raises(panpipe.RequestError, match=f"planned and simulated and does not train: plan without {option}"):
        panpipe.pipeline(nn.Linear(2, 2), lambda model, batch: model(batch).sum(), torch.ones(2, 2), plan=plan)
