"""``panpipe plan``: plan the training of a model, or of an operator graph, on a cluster."""

from pathlib import Path
from typing import Annotated

import typer

from ..answers.bundled_models import check_model_name
from ..core.byte_sizes import byte_size


def plan(
    *,
    cluster: Annotated[
        str,
        typer.Option(
            help="A name such as 8xA100-40GB or 4x8xA100-80GB:nics=8 (see panpipe catalog), a cluster file, or cpu:N "
            "for N equal shares of this host."
        ),
    ],
    microbatches: Annotated[
        int | None,
        typer.Option(
            help="Microbatches in one step, over all replicas; with --batch their size is chosen if not given.",
            show_default=False,
        ),
    ] = None,
    graph: Annotated[
        str | None, typer.Option(metavar="FILE", help="Operator-graph file with costs.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY|NAME|FILE",
            help="A function that returns (model, step, example_batch), a bundled model such as llama-7b, or the "
            "config.json of a language model of transformers. Costs are derived from the devices' descriptions; for "
            "cpu:N the operators are timed on this host.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            help="Samples of a bundled model's step; one for each microbatch if not given.", show_default=False
        ),
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option(help="Tokens of a sample of a bundled model; as published if not given.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Data type of training: fp32, tf32, bf16, fp16, or fp8 for products of layers in 16 bit; the "
            "model's own if not given.",
            show_default=False,
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="The optimizer, for the size of its state: adam-master (the default: float32 moments, and a float32 "
            "copy of 16-bit parameters), adam, sgd or sgd-momentum.",
            show_default=False,
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="What a device may use, if less than its memory: bytes, or with a unit as in 20GB or 16GiB.",
            show_default=False,
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="auto|pp=N,dp=N",
            help="Devices along the pipeline, and replicas; the search places them. If not given: auto for a model on "
            "a described cluster, otherwise one pipeline over all devices.",
            show_default=False,
        ),
    ] = None,
    tp: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Tensor ranks that share each stage: N devices next to each other. Bundled language models split "
            "attention heads, MLP and vocabulary, with two all-reduces a block in F and in B; a factory applies "
            "parallelize_module itself. --mesh then counts groups of N devices. auto compares what fits in a node.",
            show_default=False,
        ),
    ] = None,
    tp_overlap: Annotated[
        str,
        typer.Option(
            metavar="none|backward|all",
            help="Collectives of tensor ranks that run while these compute: in the backward those of column layers, as "
            "in Megatron-LM, or all, in parts, as with Transformer Engine's user buffers.",
        ),
    ] = "none",
    cp: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Context ranks that share the tokens of each sample, with ring attention: keys and values are passed "
            "on while scores are computed. They sum gradients at the end. --mesh then counts groups of devices.",
        ),
    ] = 1,
    cp_order: Annotated[
        str,
        typer.Option(
            metavar="zigzag|contiguous",
            help="Tokens of a context rank: two parts of the sample, so that causal attention takes all ranks equally "
            "long, or one.",
        ),
    ] = "zigzag",
    ep: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Expert ranks of a mixture model such as Mixtral: each has 1/N of the experts and of a microbatch's "
            "samples, and tokens are exchanged by all-to-all, equally many for each expert. --mesh then counts groups "
            "of devices.",
        ),
    ] = 1,
    kernels: Annotated[
        str,
        typer.Option(
            metavar="eager|compiled|fused",
            help="How the kernels of a described device are written: one for each operator; a layer's operators along "
            "rows and element by element together, as torch.compile does with each layer; these of the whole model, "
            "with FlashAttention-3 and sums of weight gradients in products, as Transformer Engine has them.",
        ),
    ] = "eager",
    sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel",
            help="Tensor ranks of a bundled model also share the tokens between their layers: a reduce-scatter and an "
            "all-gather in place of each all-reduce.",
        ),
    ] = False,
    shard: Annotated[
        str,
        typer.Option(
            metavar="none|optimizer|gradients|parameters|auto[:N]",
            help="What replicas share, so that each holds a part: with optimizer the state of the optimizer (ZeRO-1); "
            "with gradients these, too (ZeRO-2), summed for each microbatch; with parameters all three (ZeRO-3), "
            "gathered for runs of a stage's microbatches; with :N groups of N replicas share, as parameters:8 (hybrid "
            "sharding, HSDP); auto shards the stages that do not fit otherwise, as little "
            "as fits.",
        ),
    ] = "none",
    recompute: Annotated[
        str | None,
        typer.Option(
            metavar="none|all|auto|every:N|attention",
            help="Stages that run their forward again before their backward. every:N: no stage, but the backward of "
            "each N-th layer computes it again from its inputs. attention: it computes scores and probabilities of "
            "attention again that is written out, as Megatron-LM's selective recomputation. If not given: auto (if "
            "memory is short) for a model on a described cluster, otherwise none.",
            show_default=False,
        ),
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(
            metavar="none|all|auto|STAGE:SHARE,…",
            help="Saved tensors that are copied to the host until the backward reads them. all: as much as the links "
            "carry. auto: where memory is short, what makes the step fastest. STAGE:SHARE: shares of stages. If not "
            "given: none, or as the schedule does, such as po-f.",
            show_default=False,
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Saved tensors that each host may hold, as --memory-limit; by default what the cluster file says.",
            show_default=False,
        ),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(
            metavar="NAME|auto",
            help="Search cuts for this schedule only; auto searches over all schedules, and over orders derived from "
            "them.",
        ),
    ] = "auto",
    chunks: Annotated[
        int | None,
        typer.Option(
            metavar="V",
            help="Stages of each device, as of interleaved-1f1b; with --shard parameters and pp=1, parts of the model "
            "whose parameters are gathered one after another. Chosen by the search if not given.",
            min=1,
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            help="Most candidate plans to evaluate, in all parts of the search together, in addition to the published "
            "schedules that it starts from; by default as many as take about ten seconds on one core.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="End the search after this time, with the best plan so far. It ends earlier when --budget, or its "
            "default, is spent: a longer search needs a larger --budget, too. Capture and compilation are not part of "
            "it.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        bool | None,
        typer.Option(
            "--layers/--operators",
            help="End stages between layers only (modules that repeat, such as layers.3, by the operators' names), or "
            "between any operators. If not given: between layers for a model on a described cluster that has enough of "
            "them and does not offload.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the search's random numbers.", min=0, max=2**31 - 1)] = 0,
    samples: Annotated[
        int | None, typer.Option(help="Rows of the batch of one step, for the throughput.", min=1, show_default=False)
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens in the batch of one step, for the throughput.", min=1, show_default=False)
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            help="Number of plans to show: the fastest, and slower ones with a lower peak of their fullest device.",
            min=1,
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the plan here, and further ones next to it: plan.2.json, …", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Choose stages, schedule and its parameters, and predict time and memory.

    All tensors between two stages are sent as one message. For an operator-graph file the predicted step has messages
    without contention: the latencies of the path plus the bytes at the path's rate. Where messages share links the
    search continues with contention, and the simulator compares the best plans; its step is printed, too. A model's
    best plans are compared in the simulator, where messages also use memory.
    """
    if model is not None and graph is None:
        check_model_name(model)  # before slow imports
    from ..answers.plan.options import PlanOptions
    from ..answers.plan.planning import run

    limit = byte_size("--memory-limit", memory_limit, model is not None)
    options = PlanOptions(
        cluster=cluster, microbatches=microbatches, graph=graph, model=model, batch=batch,
        sequence=sequence, dtype=dtype, optimizer=optimizer, memory_limit=limit, mesh=mesh, recompute=recompute,
        offload=offload, host_memory=byte_size("--host-memory", host_memory), shard=shard, schedule=schedule,
        chunks=chunks, sequence_parallel=sequence_parallel, kernels=kernels, tp_overlap=tp_overlap, cp=cp,
        cp_order=cp_order, ep=ep, budget=budget, seed=seed, layers=layers, samples=samples, tokens=tokens,
    )  # fmt: skip
    run(options, tp=tp, seconds=seconds, top=top, out=out, json=json)
