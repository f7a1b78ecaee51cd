"""The options of ``panpipe plan`` that describe a request: the same for the command line and the explorer."""

import re
from typing import Any

from attrs import frozen

from ...core.analytic.kinds import KERNELS, ORDERS
from ...core.arguments import byte_size
from ..options import check_declared, declared

ATTENTION = "attention"
"""Recomputation of the core of attention."""
EVERY = re.compile(r"every:([1-9]\d{0,6})")
"""Recomputation of each n-th layer."""
TENSOR_OPTIONS, CONTEXT_OPTIONS = ("tp_overlap", "sequence_parallel"), ("cp_order",)
"""Options of ``panpipe plan`` for several tensor ranks, and for several context ranks."""


@frozen(kw_only=True)
class PlanOptions:
    """The options of ``panpipe plan``. None is an option not given.

    ``tp`` is not one of them: each number of tensor ranks that it allows has a request of its own.
    """

    cluster: str = declared(
        "A name such as 8xA100-40GB or 4x8xA100-80GB:nics=8 (see panpipe catalog), a cluster file, or cpu:N for N "
        "equal shares of this host.", ...
    )  # fmt: skip
    microbatches: int | None = declared(
        "Microbatches in one step, over all replicas; with --batch their size is chosen if not given.",
        least=1,
    )
    graph: str | None = declared("Operator-graph file with costs.", metavar="FILE")
    model: str | None = declared(
        "A function that returns (model, step, example_batch), a bundled model such as llama-7b, or the config.json of "
        "a language model of transformers. Costs are derived from the devices' descriptions; for cpu:N the operators "
        "are timed on this host.", metavar="MODULE:FACTORY|NAME|FILE",
    )  # fmt: skip
    batch: int | None = declared("Samples of a bundled model's step; one for each microbatch if not given.", least=1)
    sequence: int | None = declared("Tokens of a sample of a bundled model; as published if not given.", least=2)
    dtype: str | None = declared(
        "Data type of training: fp32, tf32, bf16, fp16, or fp8 for products of layers in 16 bit; the model's own if "
        "not given."
    )
    optimizer: str | None = declared(
        "The optimizer, for the size of its state: adam-master (the default: float32 moments, and a float32 copy of "
        "16-bit parameters), adam, sgd or sgd-momentum."
    )
    memory_limit: float | None = declared(
        "What a device may use, if less than its memory: bytes, or with a unit as in 20GB or 16GiB.",
        metavar="SIZE", parser=str,  # read below: with a model the text needs a unit
    )  # fmt: skip
    mesh: str | None = declared(
        "Devices along the pipeline, and replicas; the search places them. If not given: auto for a model on a "
        "described cluster, otherwise one pipeline over all devices.", metavar="auto|pp=N,dp=N",
    )  # fmt: skip
    tp_overlap: str = declared(
        "Collectives of tensor ranks that run while these compute: in the backward those of column layers, as in "
        "Megatron-LM, or all, in parts, as with Transformer Engine's user buffers.",
        "none", metavar="none|backward|all", choices=("none", "backward", "all"),
    )  # fmt: skip
    cp: int = declared(
        "Context ranks that share the tokens of each sample, with ring attention: keys and values are passed on while "
        "scores are computed. They sum gradients at the end. --mesh then counts groups of devices.",
        1, metavar="N", least=1,
    )  # fmt: skip
    cp_order: str = declared(
        "Tokens of a context rank: two parts of the sample, so that causal attention takes all ranks equally long, or "
        "one.", "zigzag", metavar="zigzag|contiguous", choices=ORDERS,
    )  # fmt: skip
    ep: int = declared(
        "Expert ranks of a mixture model such as Mixtral: each has 1/N of the experts and of a microbatch's samples, "
        "and tokens are exchanged by all-to-all, equally many for each expert. --mesh then counts groups of devices.",
        1, metavar="N", least=1,
    )  # fmt: skip
    kernels: str = declared(
        "How the kernels of a described device are written: one for each operator; a layer's operators along rows and "
        "element by element together, as torch.compile does with each layer; these of the whole model, with "
        "the attention of Transformer Engine and sums of weight gradients in products.",
        "eager", metavar="eager|compiled|fused", choices=KERNELS,
    )  # fmt: skip
    sequence_parallel: bool = declared(
        "Tensor ranks of a bundled model also share the tokens between their layers: a reduce-scatter and an "
        "all-gather in place of each all-reduce.", False, "--sequence-parallel",
    )  # fmt: skip
    shard: str = declared(
        "What replicas share, so that each holds a part: with optimizer the state of the optimizer (ZeRO-1); with "
        "gradients these, too (ZeRO-2), summed for each microbatch; with parameters all three (ZeRO-3), gathered for "
        "runs of a stage's microbatches; with :N groups of N replicas share, as parameters:8 (hybrid sharding, HSDP); "
        "auto shards the stages that do not fit otherwise, as little as fits.",
        "none", metavar="none|optimizer|gradients|parameters|auto[:N]",
    )  # fmt: skip
    recompute: str | None = declared(
        "Stages that run their forward again before their backward. every:N: no stage, but the backward of each N-th "
        "layer computes it again from its inputs. attention: it computes scores and probabilities of attention again "
        "that is written out, as Megatron-LM's selective recomputation. If not given: auto (if memory is short) for a "
        "model on a described cluster, otherwise none.", metavar="none|all|auto|every:N|attention",
    )  # fmt: skip
    offload: str | None = declared(
        "Saved tensors that are copied to the host until the backward reads them. all: as much as the links carry. "
        "auto: where memory is short, what makes the step fastest. STAGE:SHARE: shares of stages. If not given: none, "
        "or as the schedule does, such as po-f.", metavar="none|all|auto|STAGE:SHARE,…",
    )  # fmt: skip
    host_memory: float | None = declared(
        "Saved tensors that each host may hold, as --memory-limit; by default what the cluster file says.",
        metavar="SIZE", parser=str,
    )  # fmt: skip
    schedule: str = declared(
        "Search cuts for this schedule only; auto searches over all schedules, and over orders derived from them.",
        "auto", metavar="NAME|auto",
    )  # fmt: skip
    chunks: int | None = declared(
        "Stages of each device, as of interleaved-1f1b; with --shard parameters and pp=1, parts of the model whose "
        "parameters are gathered one after another. Chosen by the search if not given.", metavar="V", least=1,
    )  # fmt: skip
    budget: int | None = declared(
        "Most candidate plans to evaluate, in all parts of the search together, in addition to the published schedules "
        "that it starts from; by default as many as take about ten seconds on one core.",
        least=1,
    )
    layers: bool | None = declared(
        "End stages between layers only (modules that repeat, such as layers.3, by the operators' names), or between "
        "any operators. If not given: between layers for a model on a described cluster that has enough of them and "
        "does not offload.", None, "--layers/--operators",
    )  # fmt: skip
    seed: int = declared("Seed of the search's random numbers.", 0, min=0, max=2**31 - 1)
    samples: int | None = declared("Rows of the batch of one step, for the throughput.", least=1)
    tokens: int | None = declared("Tokens in the batch of one step, for the throughput.", least=1)

    def __attrs_post_init__(self) -> None:
        check_declared(self)
        for name in ("memory_limit", "host_memory"):
            given: Any = getattr(self, name)
            option = f"--{name.replace('_', '-')}"
            object.__setattr__(self, name, byte_size(option, given, isinstance(given, str) and self.model is not None))

    @property
    def every(self) -> int | None:
        """Each layer after as many computes its forward again; None for none."""
        found = EVERY.fullmatch(self.recompute or "")
        return int(found[1]) if found else None

    @property
    def within(self) -> str:
        """What backwards compute again within stages that do not recompute; empty for nothing."""
        return self.recompute or "" if self.recompute == ATTENTION or self.every else ""
