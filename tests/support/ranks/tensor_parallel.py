"""Models after ``parallelize_module``, trained over pipeline × tensor ranks, compared with one process; see `ranks`."""

import copy
import shutil
import tempfile
from pathlib import Path

import panpipe
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from attrs import evolve
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.errors import RequestError
from panpipe.runtimes.checkpoint.reading import CheckpointReader
from panpipe.runtimes.diagnose.parity import reference_step
from panpipe.runtimes.tensor_parallel.tensor_ranks import TensorRanks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from ...laws.grouped import grouped
from ...laws.lengths.walks import Captures
from ..cuts import even_plan
from ..offloading import all_away
from ..parity import largest

HIDDEN, HEADS, TOKENS, WORDS = 8, 2, 6, 12
MICROBATCHES, ROWS = 2, 4


class Block(nn.Module):
    """A transformer block whose attention works on any number of heads of its own."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.rate, self.dropout = rate, nn.Dropout(rate)
        self.norm, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.rate * self.training)
        x = x + self.dropout(self.o(y.transpose(1, 2).flatten(-2)))
        return x + self.down(self.dropout(nn.functional.gelu(self.up(self.norm2(x)))))


class ScaledEmbedding(nn.Embedding):
    """Its buffer becomes a replicated DTensor by ``parallelize_module``, as Gemma's."""

    def __init__(self):
        super().__init__(WORDS, HIDDEN)
        self.register_buffer("scale", torch.tensor(HIDDEN**0.5), persistent=False)

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


class Model(nn.Module):
    def __init__(self, blocks=2, rate=0.0):
        super().__init__()
        self.dropout = nn.Dropout(rate)
        self.embedding = ScaledEmbedding()
        self.position = nn.Parameter(torch.zeros(TOKENS, HIDDEN))
        self.blocks = nn.ModuleList([Block(rate) for _ in range(blocks)])
        self.head = nn.Linear(HIDDEN, WORDS)

    @torch.no_grad()
    def scale(self, x):
        """A factor through which no gradient flows."""
        return 1 / (1 + x.abs().mean())

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        x = self.dropout(x * self.scale(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def step(model, batch):
    logits = model(batch["tokens"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["next"].flatten())


def batch(number=0, rows=ROWS):
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(WORDS, (rows, TOKENS + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "next": tokens[:, 1:]}


def parallelized(model, mesh):
    """The standard layouts: columns then rows in attention and MLP, words of the embedding and of the head."""
    parallelize_module(
        model,
        mesh,
        {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())},
    )
    for block in model.blocks:
        columns, rows = ("q", "k", "v", "up"), ("o", "down")
        plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        parallelize_module(block, mesh, plan)
    return model


class Perceptron(nn.Module):
    """Pairs of layers, of which the first is in columns and the second in rows."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.ups = nn.ModuleList([nn.Linear(HIDDEN, 2 * HIDDEN) for _ in range(2)])
        self.downs = nn.ModuleList([nn.Linear(2 * HIDDEN, HIDDEN) for _ in range(2)])

    def forward(self, x):
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(self.norm(x))))
        return x


def squared(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def points(number=0):
    generator = torch.Generator().manual_seed(number)
    return {
        name: torch.randn(ROWS, size, generator=generator).double() for name, size in (("x", HIDDEN), ("y", HIDDEN))
    }


PAIRS = {"ups.*": ColwiseParallel(), "downs.*": RowwiseParallel()}
"""The layouts of a `Perceptron`."""


def tensor_mesh(layout=("pp", "tp"), sizes=(2, 2)):
    return init_device_mesh("cpu", sizes, mesh_dim_names=layout)["tp"]


def perceptron(kind=Perceptron, mesh=None):
    """A model, the same over tensor ranks, step, batch."""
    torch.manual_seed(1)
    alone = kind().double()
    return alone, parallelize_module(copy.deepcopy(alone), mesh or tensor_mesh(), PAIRS), squared, points


def transformer(layout=("pp", "tp"), rate=0.0):
    torch.manual_seed(1)
    alone = Model(rate=rate).double()
    return alone, parallelized(copy.deepcopy(alone), tensor_mesh(layout)), step, batch


def planned(model, function, given, away=False):
    """An even plan of two stages over two tensor ranks each, as ``panpipe plan --tp 2`` writes it.

    With ``away`` all saved tensors are offloaded.
    """
    ranks = TensorRanks.of(model, function)
    piece = {name: leaf[: ROWS // MICROBATCHES] for name, leaf in given.items()}
    operators = operators_of(capture_step(ranks.parts, ranks.step, piece))
    plan = even_plan(operators, 2, MICROBATCHES)
    return evolve(all_away(plan, operators) if away else plan, mesh=Mesh(2, tensor=2))


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def held_here(pipe):
    return {name: p for name, p in pipe._session.model.named_parameters() if not p.is_meta}


def furthest(pipe, alone):
    """The largest distance of a parameter here from that of one process."""
    wanted = dict(alone.named_parameters())
    return largest((whole(p.detach()) - wanted[name]).abs().max().item() for name, p in held_here(pipe).items())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


AUTOMATIC = {"schedule": "1f1b", "cache": False}


def trained(made, optimizer=sgd, steps=3, clip_norm=None, lengths=(), then=None, **options):
    """The largest distances from one process over some steps, the later ones with texts of these lengths.

    ``then(pipe, model)`` is called at the end.
    """
    alone, model, step, batch = made
    options = {"microbatches": MICROBATCHES, "batch_dims": 0, **options}
    pipe = panpipe.pipeline(model, step, batch(), **grouped(optimizer=optimizer, clip_norm=clip_norm, **options))
    own = optimizer(list(alone.named_parameters()))
    found = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0, "norm": 0.0}
    batches, captures = [batch(number) for number in range(steps)], Captures()
    for length in lengths:
        batches.append({name: leaf[:, :length] for name, leaf in batch(len(batches)).items()})
    for number, given in enumerate(batches):
        with captures.counted():
            loss = pipe.step(given).item()
        expected = reference_step(alone, step, given, microbatches=MICROBATCHES, index=number).item()
        if clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(alone.parameters(), clip_norm).item()
            found["norm"] = largest((found["norm"], abs(pipe.metrics.grad_norm - norm)))
        own.step()
        found["loss"] = largest((found["loss"], abs(loss - expected)))
        found["parameter"] = largest((found["parameter"], furthest(pipe, alone)))
        wanted = dict(alone.named_parameters())
        for name, parameter in held_here(pipe).items():
            far = (whole(parameter.grad) - wanted[name].grad).norm() / wanted[name].grad.norm().clamp_min(1e-3)
            found["gradient"] = largest((found["gradient"], far.item()))
    found["here"], found["all"] = sorted(held_here(pipe)), [name for name, _ in pipe._session.model.named_parameters()]
    found["stages"] = sorted(pipe._session.stage_parameters)
    found["captures"] = captures.count
    found["offloaded"] = pipe.plan.offloaded_bytes
    found["then"] = then(pipe, model) if then else None
    pipe.close()
    return found


def refused(work):
    try:
        work()
    except RequestError as error:
        return str(error)
    return "nothing"


def rows(model, batch):
    return model(batch["x"])


WRONG = {
    "backend is 'simulator'": {"backend": "simulator"}, "devices is given": {"devices": "cpu"},
    "shard is 'optimizer' and no plan": {"shard": "optimizer"}, "weights is given": {"weights": "file"},
    "compile is given": {"compile": "inductor"}, "replan is given": {"replan": "auto"},
    "the ranks of the job are pp=2,dp=1,tp=2": {"mesh": "pp=4"},
}  # fmt: skip
"""What is said of options that tensor ranks do not support."""


def small():
    """A plan as ``panpipe plan --tp`` writes it, with clipping; then a frozen parameter, and wrong options."""
    made = perceptron()
    _, model, function, given = made
    plan = planned(model, function, given())
    options = {said: grouped(optimizer=sgd, batch_dims=0, microbatches=2, **wrong) for said, wrong in WRONG.items()}
    wrong = {
        said: refused(lambda one=one: panpipe.pipeline(model, function, given(), **one))
        for said, one in options.items()
    }

    def freeze(pipe, model):
        model.ups[0].weight.requires_grad_(False)
        return refused(lambda: pipe.step(given()))

    return {"trained": trained(made, steps=2, plan=plan, clip_norm=0.1, then=freeze), "refused": wrong}


def used():
    """The other uses of a pipeline, each compared with one process, and what is said to wrong ones."""
    alone, model, function, given = perceptron()
    plan = planned(model, function, given())
    pipe = panpipe.pipeline(model, function, given(), optimizer=sgd, plan=plan, batch_dims=0)
    own, found = sgd(list(alone.named_parameters())), {}
    half = {name: leaf[:3] for name, leaf in given(1).items()}
    loss = pipe.step(half)
    expected = reference_step(alone, function, half, microbatches=MICROBATCHES)
    own.step()
    found["another size"] = abs((loss - expected).item()) + furthest(pipe, alone)
    pipe.step(given(2), update=False)
    pipe.step(given(3))
    both = {name: torch.cat([leaf, given(3)[name]]) for name, leaf in given(2).items()}
    reference_step(alone, function, both, microbatches=2 * MICROBATCHES)
    own.step()
    found["accumulated"] = furthest(pipe, alone)
    with torch.no_grad():
        found["evaluated"] = abs((pipe.evaluate(given(4)) - function(alone, given(4))).item())
        found["rows"] = (pipe.forward(given(5), rows) - rows(alone, given(5))).abs().max().item()
    found["batch"] = refused(lambda: pipe.step(given(6 + dist.get_rank() % 2)))
    found["unchanged"] = furthest(pipe, alone)
    found["function"] = refused(
        lambda: panpipe.weights.ema(pipe, function=lambda average, parameter, updates: parameter)
    )
    pipe.close()
    for name, options in (
        ("compile", {"compile": "inductor"}),
        ("optimizer", {"optimizer": torch.optim.Adafactor}),
    ):
        _, other, *_ = perceptron()
        said = {"optimizer": sgd, "plan": plan, "batch_dims": 0} | options
        found[name] = refused(
            lambda other=other, said=said: panpipe.pipeline(other, function, given(), **grouped(**said))
        )
    return found


class Roots(Perceptron):
    """The gradient of its first weight is not finite in the last row alone, which is of the last tensor rank."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.ups[0].weight[-1], self.ups[0].bias[-1] = 0, 0

    def forward(self, x):
        x = self.downs[0](self.ups[0](x).square().sqrt())
        return self.downs[1](torch.relu(self.ups[1](self.norm(x))))


def unsteppable(**options):
    """Whether a step with gradients that are not finite on one tensor rank is skipped here, and changes nothing."""
    alone, model, *_ = perceptron(Roots)
    plan = planned(model, squared, points())
    pipe = panpipe.pipeline(model, squared, points(), **grouped(optimizer=sgd, plan=plan, batch_dims=0, **options))
    finite = pipe.step(points()).isfinite().item()
    found = [finite, pipe.metrics.skipped, furthest(pipe, alone) == 0]
    pipe.close()
    return found


def guarded():
    """A batch with values that are not finite between others, with a scaler and without: no tensor rank updates."""
    found = {}
    for name in ("skip", "raise", "scaler"):
        alone, model, function, given = perceptron()
        options = {"scaler": torch.amp.GradScaler("cpu", 2.0**10, growth_interval=2)} if name == "scaler" else {}
        own, own_scaler = sgd(list(alone.named_parameters())), torch.amp.GradScaler("cpu", 2.0**10, growth_interval=2)
        pipe = panpipe.pipeline(
            model, function, given(),
            **grouped(optimizer=sgd, plan=planned(model, function, given()), batch_dims=0, clip_norm=0.1,
                      on_nonfinite="warn" if name == "scaler" else name, **options),
        )  # fmt: skip
        found[name] = one = {"far": 0.0, "skipped": [], "said": "", "scales": []}
        for number in range(4):
            batch = given(number)
            if number == 1:
                batch["x"][-1, 0] = float("inf")
            try:
                pipe.step(batch)
            except panpipe.NonFiniteError as error:
                one["said"] = f"{error.replica} {error.microbatch} {error}"
            reference_step(alone, function, batch, microbatches=MICROBATCHES, scaler=own_scaler if options else None)
            if options:
                own_scaler.unscale_(own)
                nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
                own_scaler.step(own)
                own_scaler.update()
                one["scales"].append([options["scaler"].get_scale(), own_scaler.get_scale()])
            elif number != 1:
                nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
                own.step()
            one["skipped"].append(pipe.metrics.skipped)
            one["far"] = largest((one["far"], furthest(pipe, alone)))
        pipe.close()
    found["one part"] = [
        unsteppable(scaler=torch.amp.GradScaler("cpu")), unsteppable(clip_norm=0.1, on_nonfinite="skip")
    ]  # fmt: skip
    return found


def observed():
    """Steps that are measured, and whose saved tensors leave the device."""
    reports, made = [], perceptron()
    _, model, function, given = made
    plan = planned(model, function, given(), away=True)
    found = {"trained": trained(made, plan=plan, monitor=reports.append, clip_norm=0.1)}
    found["reports"] = [[one.rows, len(one.devices), one.updated] for one in reports]
    return found


def shared_folder():
    """A new folder of all ranks."""
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return Path(found[0])


def saved():
    """Checkpoints and saved weights: those of one process, and the same bits when training resumes."""
    alone, model, function, given = perceptron()
    plan, folder, found = planned(model, function, given()), shared_folder(), {}

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=0.05)

    def built(model):
        return panpipe.pipeline(model, function, given(), optimizer=adamw, plan=plan, batch_dims=0)

    pipe = built(model)
    ema, averages = panpipe.weights.ema(pipe, 0.5), {name: p.detach().clone() for name, p in alone.named_parameters()}
    found["mesh"] = [pipe.plan.mesh.pipeline, pipe.plan.mesh.data, pipe.plan.mesh.tensor, pipe.plan.mesh.devices]
    own = adamw(list(alone.named_parameters()))
    for number in range(2):
        pipe.step(given(number))
        reference_step(alone, function, given(number), microbatches=MICROBATCHES)
        own.step()
        for name, parameter in alone.named_parameters():
            averages[name].lerp_(parameter.detach(), 0.5)
    with ema.applied(), torch.no_grad():
        averaged = torch.func.functional_call(alone, averages, (given(0)["x"],))
        found["averaged"] = abs((pipe.evaluate(given(0)) - (averaged - given(0)["y"]).square().mean()).item())
    held = copy.deepcopy(pipe.state_dict())
    found["whole"] = largest(
        (held["model"][name] - wanted.detach()).abs().max().item()
        for name, wanted in alone.named_parameters() if name in held["model"]
    )  # fmt: skip
    dcp.save({"pipe": pipe}, checkpoint_id=folder / "dcp")
    pipe.checkpoint(folder / "now")
    pipe.checkpoint(folder / "later", wait=False)
    pipe.save(folder / "weights")
    pipe._session.checkpoints.wait()
    after = [pipe.step(given(number)).item() for number in (2, 3)]
    pipe.close()

    state = CheckpointReader(folder / "now").whole().tensors
    weights = {
        name: tensor
        for path in (folder / "weights").glob("*.safetensors")
        for name, tensor in safetensors.torch.load_file(path).items()
    }
    wanted = dict(alone.named_parameters())
    for name, parameter in wanted.items():
        moment = own.state[parameter]["exp_avg_sq"]
        for there, value in (
            (state[f"model.{name}"], parameter), (weights[name], parameter),
            (state[f"optimizer.state.{name}.exp_avg_sq"], moment), (state[f"ema.0.tensors.{name}"], averages[name]),
        ):  # fmt: skip
            found["apart"] = largest((found.get("apart", 0.0), (there - value.detach()).abs().max().item()))
    found["names"] = sorted(weights) == sorted(wanted)
    for name in ("now", "later"):
        pipe = built(perceptron()[1])
        panpipe.weights.ema(pipe, 0.5)
        pipe.resume(folder / name)
        found[name] = pipe.metrics.steps == 2 and [pipe.step(given(number)).item() for number in (2, 3)] == after
        pipe.close()
    for name in ("state", "dcp"):
        pipe = built(perceptron()[1])
        again = panpipe.weights.ema(pipe, 0.5)
        if name == "state":
            pipe.load_state_dict(held)
        else:
            dcp.load({"pipe": pipe}, checkpoint_id=folder / "dcp")
        found[name] = pipe.metrics.steps == 2 and again.updates == 2
        found[name] &= [pipe.step(given(number)).item() for number in (2, 3)] == after
        pipe.close()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return found


class InSlices(nn.Module):
    """A model whose residual stream is in slices of the sequence between its layers."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.dropout, self.drops = nn.Dropout(rate), nn.ModuleList([nn.Dropout(rate) for _ in range(2)])
        self.embedding, self.head = nn.Embedding(WORDS, HIDDEN), nn.Linear(HIDDEN, WORDS)
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN) for _ in range(3)])
        self.ups = nn.ModuleList([nn.Linear(HIDDEN, 4 * HIDDEN) for _ in range(2)])
        self.downs = nn.ModuleList([nn.Linear(4 * HIDDEN, HIDDEN) for _ in range(2)])

    def forward(self, tokens):
        x = self.embedding(tokens)
        for norm, up, down, drop in zip(self.norms, self.ups, self.downs, self.drops, strict=False):
            x = x + self.dropout(down(torch.relu(up(drop(norm(x))))))
        return self.head(self.norms[-1](x))


def in_slices(loss_in_parts, rate=0.0):
    """With SequenceParallel, and with the loss of parts of the words or of all of them."""
    torch.manual_seed(1)
    alone = InSlices(rate).double()
    last = (
        {"output_layouts": Shard(-1), "use_local_output": False} if loss_in_parts else {"output_layouts": Replicate()}
    )
    layouts = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norms.*": SequenceParallel(),
        "drops.*": SequenceParallel(),
        "ups.*": ColwiseParallel(input_layouts=Shard(1)), "downs.*": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), **last),
    }  # fmt: skip

    def in_parts(model, batch):
        with loss_parallel():
            return step(model, batch)

    model = parallelize_module(copy.deepcopy(alone), tensor_mesh(), layouts)
    return alone, model, in_parts if loss_in_parts else step, batch


def llama():
    """A Llama of transformers with the usual layouts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": WORDS}
    alone = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=32, use_cache=False, **sizes)).double()
    layers = {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    layers |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    layers |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    model, mesh = copy.deepcopy(alone), tensor_mesh()
    ends = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    ends["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, ends | {f"model.layers.*.{name}": layout for name, layout in layers.items()})

    def loss_of(model, batch):
        return model(input_ids=batch["tokens"], labels=batch["tokens"], use_cache=False).loss

    return alone, model, loss_of, batch


def with_layouts():
    """Other layouts than columns and rows, and a model of transformers; by an automatic plan."""
    return {
        "slices": trained(in_slices(loss_in_parts=False), steps=1, lengths=(2, 4), **AUTOMATIC),
        "loss in parts": trained(in_slices(loss_in_parts=True), steps=1, lengths=(4, 2), **AUTOMATIC),
        "llama": trained(llama(), steps=1, lengths=(3, 5, 4), **AUTOMATIC),
    }


def with_replicas(mesh, shared=False):
    """The largest distance from one process that trains on the batches of all replicas: pp=2, dp=2, tp=2.

    With ``shared`` by a plan in which replicas share the optimizer.
    """
    names = [part.split("=")[0] for part in mesh.split(",")]
    groups = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    alone, model, *_ = perceptron(mesh=groups["tp"])

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=0.05)

    options = {"microbatches": 2, "mesh": mesh, **AUTOMATIC}
    if shared:
        plan = planned(model, squared, points())
        options = {"plan": evolve(plan, mesh=Mesh(2, 2, tensor=2), shard=("optimizer", "optimizer"))}
    pipe = panpipe.pipeline(
        model, squared, points(), **grouped(optimizer=adamw, batch_dims=0, clip_norm=0.1, **options)
    )
    own, replica, far = adamw(list(alone.named_parameters())), groups["dp"].get_local_rank(), 0.0
    for number in range(3):
        loss = pipe.step(points(10 * number + replica)).item()
        batches = [points(10 * number + each) for each in range(2)]
        both = {name: torch.cat([each[name] for each in batches]) for name in batches[0]}
        expected = reference_step(alone, squared, both, microbatches=4).item()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1).item()
        own.step()
        wanted = dict(alone.named_parameters())
        far = largest((far, abs(loss - expected), abs(pipe.metrics.grad_norm - norm), furthest(pipe, alone)))
        for name, parameter in held_here(pipe).items():
            if not shared:  # gradients are in parts
                far = largest((far, (whole(parameter.grad) - wanted[name].grad).abs().max().item()))
    found = {"far": far, "mesh": [pipe.plan.mesh.pipeline, pipe.plan.mesh.data, pipe.plan.mesh.tensor]}
    states = [state for optimizer in pipe.optimizers.values() for state in optimizer.state.values()]
    found["elements"] = sum(state["exp_avg"].numel() for state in states)
    found["held"] = sum(p.numel() for held in pipe._session.stage_parameters.values() for p in held.values())
    if shared:
        moments = pipe.state_dict()["optimizer"]
        for name, parameter in alone.named_parameters():
            if f"state.{name}.exp_avg" in moments:
                there = moments[f"state.{name}.exp_avg"] - own.state[parameter]["exp_avg"]
                found["far"] = largest((found["far"], there.abs().max().item()))
    pipe.close()
    return found


def with_dropout():
    """Dropout of what all ranks have, of the features and the heads of one rank, and of slices of the sequence."""
    return {
        "heads": trained(transformer(rate=0.3), steps=1, lengths=(3, 5, 4), recompute="all", **AUTOMATIC),
        "slices": trained(in_slices(loss_in_parts=True, rate=0.3), steps=1, lengths=(4, 2), **AUTOMATIC),
    }


def large():
    """Automatic plans of a transformer, with tensor ranks next to each other and apart."""
    adamw = torch.optim.AdamW
    return {
        "neighbours": trained(transformer(), steps=2, lengths=(3, 5, 4), **AUTOMATIC),
        "apart": trained(
            transformer(("tp", "pp")), adamw, clip_norm=0.1, mesh="pp=2,tp=2", recompute="all", **AUTOMATIC
        ),
    }
