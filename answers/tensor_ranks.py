"""The model of one tensor rank: the standard column and row plan of Megatron-LM for transformers' language models.

Attention heads, the inner dimension of the MLP and the vocabulary are split over t ranks (arXiv 1909.08053, section 3):

=====================  ======================================  =============================================
layers                 weights of one rank                     all-reduces, of a microbatch's hidden states
=====================  ======================================  =============================================
query, key, value;     1/t of the output features              none
up, gate
output; down           1/t of the input features               one after it, in F and in B
embedding              1/t of the vocabulary                   one after it, in F and in B
head and loss          1/t of the vocabulary                   of a number per token: maximum, sum, own logit
=====================  ======================================  =============================================

Layer norms, biases after an all-reduce and position embeddings are whole on each rank, and so are their saved tensors.
With *sequence parallelism* (arXiv 2205.05198, section 4.2.2) each rank has 1/t of the tokens there: a reduce-scatter
takes the place of each all-reduce, and an all-gather follows each norm.

Expert ranks of a mixture model have equally many of its experts each, and equally many tokens are sent to each expert:
two all-to-alls in F, and two in B. The model is on the meta device, for planning; it does not train.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from ..core.errors import RequestError
from ..core.tensor_collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, MAX, REDUCE_SCATTER, SUM

VOCABULARY_MULTIPLE = 128
"""Megatron-LM pads the vocabulary to a multiple of this × tensor ranks (``--make-vocab-size-divisible-by``)."""

COLUMN, ROW = "colwise", "rowwise"
"""Styles of layers whose output features are split, and of those whose input features are."""
PLANS = {
    "gpt2": {"c_attn": COLUMN, "c_fc": COLUMN, "c_proj": ROW},
    "bert": {"self.query": COLUMN, "self.key": COLUMN, "self.value": COLUMN, "intermediate.dense": COLUMN,
             "output.dense": ROW},
}  # fmt: skip
"""Layers that are split, by ``model_type``, where transformers has no ``base_model_tp_plan``."""

Step = Callable[[nn.Module, Any], Any]


def check_tensor_ranks(name: str, model: nn.Module, sizes: dict[str, int], tensor: int) -> None:
    """Refuse a model that these tensor ranks cannot share.

    Args:
        sizes: what is split: attention heads and their groups, and the inner dimension of the MLP.

    Raises:
        RequestError: there is no plan for its class, or a size is no multiple of ``tensor``.
    """
    plan = _plan(model)
    styles = set(plan.values())
    mixed = tuple(name.rpartition(".")[0] for name, each in model.named_modules() if _is_mixture(each))
    shared = any(name.startswith(mixed) and _style(plan, name) for name, _ in model.named_modules())
    if not {COLUMN, ROW} <= styles or styles - {COLUMN, ROW, *_WHOLE} or shared:
        raise RequestError(
            f"--tp splits the linear layers of language models for which transformers has a plan, and '{name}' is a "
            f"{type(model).__name__}: leave --tp out"
        )
    for what, size in sizes.items():
        if size % tensor:
            raise RequestError(
                f"'{name}' has {size} {what}, which {tensor} tensor ranks cannot share equally: give --tp a divisor of "
                f"{size}"
            )


_WHOLE = (
    "embedding_rowwise", "replicated_with_grad_allreduce", "colwise_gather_output", "colwise_rep", "packed_colwise",
    "moe_tp_experts",
)  # fmt: skip
"""Other styles of transformers' plans, for layers that are whole here, or whose split does not depend on the plan."""


def _plan(model: nn.Module) -> dict[str, str]:
    """How each layer is split, by the end of its name."""
    config: Any = model.config
    given = getattr(config, "base_model_tp_plan", None) or PLANS.get(config.model_type, {})
    return {path.rpartition("*.")[2]: style for path, style in given.items()}


def _style(plan: dict[str, str], name: str) -> str | None:
    """How a layer is split; None for a whole one."""
    found = (style for end, style in plan.items() if f".{name}".endswith(f".{end}"))
    return next((style for style in found if style in (COLUMN, ROW)), None)


def model_of_rank(model: nn.Module, tensor: int, rank: int = 0, *, tokens: int | None = None) -> tuple[nn.Module, Step]:
    """A rank's part of a model, and its step.

    The loss is that of the whole model. The gradients of a rank's loss are of the sum of all ranks' losses; those of
    whole parameters are then summed over the ranks.

    Args:
        model: on meta; changed in place. `check_tensor_ranks` has checked it.
        rank: number of the rank; all of them have the same costs.
        tokens: of a sample, for sequence parallelism; None without it.

    Raises:
        RequestError: the ranks cannot share the tokens.
    """
    plan, summed = _plan(model), _Summed(tensor if tokens is not None else 1)
    for name, module in model.named_modules():
        style = _style(plan, name)
        if style == COLUMN:
            _split_column(module, tensor)
        elif style == ROW:
            _split_row(module, tensor, summed)
        elif _is_mixture(module):
            _split_experts(model.get_submodule(name.rpartition(".")[0]), module, tensor, summed)
        elif hasattr(module, "split_size"):  # GPT-2's attention cuts query, key and value by it
            module.split_size //= tensor
    if tokens is not None:
        _share_tokens(model, tensor, tokens)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    assert isinstance(embedding, nn.Embedding)
    own = ceil(embedding.num_embeddings / (VOCABULARY_MULTIPLE * tensor)) * VOCABULARY_MULTIPLE
    tied = head.weight is embedding.weight
    part = _EmbeddingOfRank(embedding, own, rank * own, summed)
    model.set_submodule(next(name for name, module in model.named_modules() if module is embedding), part)
    head.weight = part.weight if tied else _meta((own, embedding.embedding_dim), head.weight)
    if head.bias is not None:
        head.bias = _meta((own,), head.bias)
    return model, partial(_step_of_rank, rank * own, tokens)


@frozen
class _Summed:
    """The sum of the ranks' results, for tensors of samples, tokens and features: whole on each rank, or with the
    rank's tokens alone if ``ranks`` share these."""

    ranks: int

    def __call__(self, part: Tensor) -> Tensor:
        if self.ranks == 1:
            return ALL_REDUCE(part, SUM)  # type: ignore[no-any-return]
        samples, _, width = part.shape
        own: Tensor = REDUCE_SCATTER(part.flatten(0, 1), self.ranks)
        return own.view(samples, -1, width)


def _share_tokens(model: nn.Module, tensor: int, tokens: int) -> None:
    """Gather the tokens after each norm, and keep the rank's own of each position embedding."""
    if tokens % tensor:
        raise RequestError(
            f"{tensor} tensor ranks cannot share {tokens} tokens of a sample: give --sequence a multiple"
        )
    config: Any = model.config
    norms = [m for m in model.modules() if "Norm" in type(m).__name__
             and [p.shape[0] for p in m.parameters()][:1] == [config.hidden_size]]  # fmt: skip
    if len(norms) != 2 * config.num_hidden_layers + 1:
        raise RequestError(
            f"--sequence-parallel is for models with a norm before each attention and each MLP, and {len(norms)} "
            f"norms of {config.num_hidden_layers} layers do not look like it: leave it out"
        )
    for norm in norms:
        norm.forward = partial(_gathered, norm.forward, tensor)
    positions = getattr(model.base_model, "wpe", None)
    if positions is not None:
        whole = positions.forward
        positions.forward = lambda at: whole(at)[:, : tokens // tensor]


def _gathered(norm: Callable[[Tensor], Tensor], tensor: int, x: Tensor) -> Tensor:
    samples, own, width = x.shape
    whole: Tensor = ALL_GATHER(norm(x).flatten(0, 1), tensor)
    return whole.view(samples, own * tensor, width)


def share_experts(name: str, model: nn.Module, ranks: int) -> None:
    """Keep a rank's experts of each mixture layer, as batched products over equally many tokens each.

    Args:
        model: of transformers, on meta; changed in place. Its experts are parameters of all of them, as of version 5.

    Raises:
        RequestError: there are none, or the ranks cannot share them equally.
    """
    mixtures: list[Any] = list(filter(_is_mixture, model.modules()))
    if ranks > 1 and not mixtures:
        raise RequestError(f"--ep {ranks} is for mixture models, and '{name}' has no experts: leave it out")
    for module in mixtures:
        up, down = module.gate_up_proj, module.down_proj
        count, wide, width = up.shape
        if tuple(down.shape) != (count, width, wide // 2) or not hasattr(module, "act_fn"):
            raise RequestError(f"the experts of '{name}' are no gated MLPs as those of Mixtral: they cannot be planned")
        if count % ranks:
            raise RequestError(
                f"'{name}' has {count} experts in a layer, which {ranks} ranks cannot share equally: give --ep a "
                f"divisor of {count}"
            )
        module.gate_up_proj, module.down_proj = (_part(each, 0, ranks) for each in (up, down))
        module.forward = partial(_mixed, module, ranks)


def _is_mixture(module: nn.Module) -> bool:
    """Whether a module is the experts of a layer, whose parameters are of all of them."""
    return getattr(getattr(module, "gate_up_proj", None), "ndim", 0) == 3


def _split_experts(block: nn.Module, experts: Any, tensor: int, summed: _Summed) -> None:
    """1/t of the inner features of each expert, and the sum of all ranks' results of the block with its router."""
    experts.gate_up_proj, experts.down_proj = (
        _part(experts.gate_up_proj, 1, tensor),
        _part(experts.down_proj, 2, tensor),
    )
    whole = block.forward
    block.forward = lambda hidden: summed(whole(hidden))


def _mixed(module: Any, ranks: int, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the experts' results for each token; arguments as of the experts of transformers."""
    rows, times, own = hidden.shape[0], chosen.shape[-1], module.gate_up_proj.shape[0]
    sent = hidden.unsqueeze(1).expand(rows, times, -1).reshape(rows * times, -1)
    if ranks > 1:
        sent = ALL_TO_ALL(sent, ranks)
    sent = nn.functional.pad(sent, (0, 0, 0, -rows * times % own)).view(own, -1, hidden.shape[-1])
    gate, up = torch.bmm(sent, module.gate_up_proj.transpose(1, 2)).chunk(2, -1)
    found = torch.bmm(module.act_fn(gate) * up, module.down_proj.transpose(1, 2))
    found = found.flatten(0, 1)[: rows * times]
    if ranks > 1:
        found = ALL_TO_ALL(found.contiguous(), ranks)
    return (found.view(rows, times, -1) * weights.unsqueeze(-1).to(found.dtype)).sum(1)


def _meta(shape: Sequence[int], like: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=like.dtype, device="meta"))


def _part(whole: Any, dim: int, ranks: int) -> nn.Parameter:
    """A rank's part of a parameter along a dimension."""
    return _meta([size // ranks if at == dim else size for at, size in enumerate(whole.shape)], whole)


def _split_column(module: Any, tensor: int) -> None:
    """1/t of the output features."""
    output = 0 if isinstance(module, nn.Linear) else 1  # the weight of transformers' Conv1D is (input, output)
    module.weight = _part(module.weight, output, tensor)
    if output:
        module.nf = module.weight.shape[1]
    if module.bias is not None:
        module.bias = _part(module.bias, 0, tensor)


def _split_row(module: Any, tensor: int, summed: _Summed) -> None:
    """1/t of the input features, and the sum of all ranks' results; the bias is added to the sum."""
    linear = isinstance(module, nn.Linear)
    module.weight = _part(module.weight, 1 if linear else 0, tensor)

    def forward(x: Tensor) -> Tensor:
        whole = summed(nn.functional.linear(x, module.weight) if linear else x @ module.weight)
        return whole if module.bias is None else whole + module.bias

    module.forward = forward


class _EmbeddingOfRank(nn.Module):
    """The embedding of a rank's part of the vocabulary; tokens of other ranks are rows of zeros.

    Args:
        whole: the embedding to split.
        own: number of the rank's tokens.
        first: the first of them.
        summed: see `_Summed`.
    """

    def __init__(self, whole: nn.Embedding, own: int, first: int, summed: _Summed) -> None:
        super().__init__()
        self.weight, self.own, self.first = _meta((own, whole.embedding_dim), whole.weight), own, first
        self.summed = summed

    def forward(self, tokens: Tensor) -> Tensor:
        """The hidden states of tokens."""
        elsewhere = (tokens < self.first) | (tokens >= self.first + self.own)
        rows = nn.functional.embedding((tokens - self.first).masked_fill(elsewhere, 0), self.weight)
        return self.summed(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0))


def _step_of_rank(first: int, positions: int | None, model: nn.Module, batch: Any) -> Tensor:
    """The loss of the next token, from a rank's part of the logits, which begins with token ``first``.

    With sequence parallelism the model is given the ``positions``, which it would take from its hidden states, and, if
    attention is written out, its causal mask.
    """
    tokens = batch["tokens"]
    more: dict[str, Tensor] = {}
    if positions is not None:
        more["position_ids"] = torch.arange(positions, device=tokens.device)[None]
        if model.config._attn_implementation == "eager":  # type: ignore[union-attr]
            dtype = next(model.parameters()).dtype
            ahead = torch.full((positions, positions), torch.finfo(dtype).min, dtype=dtype, device=tokens.device)
            more["attention_mask"] = ahead.triu(1)[None, None]
    logits = model(input_ids=tokens, **more).logits
    own = logits.shape[-1]
    logits = logits.float().reshape(-1, own)
    wanted = nn.functional.pad(tokens[:, 1:], (0, 1), value=-1).reshape(-1)
    known = wanted >= 0
    largest = ALL_REDUCE(logits.detach().amax(-1), MAX)
    logits = logits - largest.unsqueeze(-1)
    total = ALL_REDUCE(logits.exp().sum(-1), SUM)
    elsewhere = (wanted < first) | (wanted >= first + own)
    picked = logits.gather(-1, (wanted - first).masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    picked = ALL_REDUCE(picked.masked_fill(elsewhere, 0.0), SUM)
    lost: Tensor = ((total.log() - picked) * known).sum()
    return lost / known.sum()
