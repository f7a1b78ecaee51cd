"""``panpipe plan``: how an operator graph, or a model, trains on a cluster."""

from pathlib import Path
from typing import Annotated

import typer

from .bundled import check_model_name


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
    graph: Annotated[Path | None, typer.Option(help="Operator-graph file with costs.", show_default=False)] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY|NAME",
            help="A function that returns (model, step, example_batch), or a bundled model such as llama-7b. Costs "
            "follow from the devices' descriptions; for cpu:N its operators are timed on this host.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Samples of a step of a bundled model; one a microbatch if not given.", show_default=False),
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option(help="Tokens of a sample of a bundled model; as published if not given.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="fp32, tf32, bf16 or fp16: what the model is trained in; its own number type if not given.",
            show_default=False,
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="Whose state is kept: adam-master (the default: float32 moments and, of 16-bit parameters, a float32 "
            "copy), adam, sgd or sgd-momentum.",
            show_default=False,
        ),
    ] = None,
    memory_limit: Annotated[
        float | None,
        typer.Option(help="Bytes that a device may hold, where less than its memory.", show_default=False),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="auto|pp=N,dp=N",
            help="Devices along the pipeline, and replicas; the search places them. If not given: auto for a model on "
            "a described cluster, else one pipeline over all devices.",
            show_default=False,
        ),
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            metavar="none|all|auto",
            help="Stages that run their forward again in front of their backward. If not given: auto, where memory is "
            "short, for a model on a described cluster, else none.",
            show_default=False,
        ),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(
            metavar="NAME|auto",
            help="Search cuts for this schedule alone; auto takes any, and orders of its own that start from them.",
        ),
    ] = "auto",
    budget: Annotated[
        int | None,
        typer.Option(
            help="Candidate plans to evaluate; by default what takes about ten seconds on one core.", show_default=False
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="End the search after so long, with the best so far.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the search's random numbers.", min=0, max=2**31 - 1)] = 0,
    samples: Annotated[
        int | None, typer.Option(help="Rows of the batch of one step, for the throughput.", min=1, show_default=False)
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens in the batch of one step, for the throughput.", min=1, show_default=False)
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            help="Show so many plans: the fastest, and slower ones that hold less on their fullest device.",
            min=1,
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the plan here, and further ones beside it: plan.2.json, …", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> None:
    """Choose stages, schedule and its parameters, and predict time and memory.

    All tensors between two stages travel as one message. For an operator-graph file it takes the latencies of its path
    plus its bytes at the path's rate, and contends with no other; a model's best plans are compared in the simulator,
    where transfers share links and messages take memory.
    """
    if model is not None and graph is None:
        check_model_name(model)  # before anything is loaded that takes time
    from .planning import run

    run(
        cluster, microbatches, graph=graph, model=model, batch=batch, sequence=sequence, dtype=dtype,
        optimizer=optimizer, memory_limit=memory_limit, mesh=mesh, recompute=recompute, schedule=schedule,
        budget=budget, seconds=seconds, seed=seed, samples=samples, tokens=tokens, top=top, out=out, json=json,
    )  # fmt: skip
