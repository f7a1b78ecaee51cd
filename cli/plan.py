"""``panpipe plan``: plan the training of a model, or of an operator graph, on a cluster."""

from pathlib import Path

from ..answers.bundled_models import check_model_name
from ..answers.options import json_flag, option, takes
from ..answers.plan.options import PlanOptions


@takes(PlanOptions)
def plan(
    options: PlanOptions,
    *,
    tp: str | None = option(
        "Tensor ranks that share each stage: N devices next to each other. Bundled language models split attention "
        "heads, MLP and vocabulary, with two all-reduces a block in F and in B; a factory applies parallelize_module "
        "itself. --mesh then counts groups of N devices. auto compares what fits in a node.", metavar="N|auto",
    ),
    seconds: float | None = option(
        "End the search after this time, with the best plan so far. It ends earlier when --budget, or its default, is "
        "spent: a longer search needs a larger --budget, too. Capture and compilation are not part of it."
    ),
    top: int | None = option(
        "Number of plans to show: the fastest, and slower ones with a lower peak of their fullest device.", min=1
    ),
    out: Path | None = option("Write the plan here, and further ones next to it: plan.2.json, …"),
    json: bool = json_flag(),
) -> None:  # fmt: skip
    """Choose stages, schedule and its parameters, and predict time and memory.

    All tensors between two stages are sent as one message. For an operator-graph file the predicted step has messages
    without contention: the latencies of the path plus the bytes at the path's rate. Where messages share links the
    search continues with contention, and the simulator compares the best plans; its step is printed, too. A model's
    best plans are compared in the simulator, where messages also use memory.
    """
    if options.model is not None and options.graph is None:
        check_model_name(options.model)  # before slow imports
    from ..answers.plan.planning import run

    run(options, tp=tp, seconds=seconds, top=top, out=out, json=json)
