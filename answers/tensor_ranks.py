"""The model of one tensor rank: the standard column and row plan of Megatron-LM for the bundled language models.

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

Layer norms, biases after an all-reduce and position embeddings are whole on each rank, and so are their saved tensors:
sequence parallelism is not part of it. The model is on the meta device, for planning; it does not train.
"""

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from ..core.capture.graph.tensor_collectives import ALL_REDUCE, MAX, SUM
from ..core.errors import RequestError

VOCABULARY_MULTIPLE = 128
"""Megatron-LM pads the vocabulary to a multiple of this × tensor ranks (``--make-vocab-size-divisible-by``)."""

COLUMNS = {
    "LlamaForCausalLM": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    "GPT2LMHeadModel": ("c_attn", "c_fc"),
}
"""Layers whose output features are split, by the model's class."""
ROWS = {"LlamaForCausalLM": ("o_proj", "down_proj"), "GPT2LMHeadModel": ("c_proj",)}
"""Layers whose input features are split."""
EMBEDDINGS = {"LlamaForCausalLM": "model.embed_tokens", "GPT2LMHeadModel": "transformer.wte"}
"""The embedding of the vocabulary."""

Step = Callable[[nn.Module, Any], Any]


def check_tensor_ranks(name: str, architecture: str, sizes: dict[str, int], tensor: int) -> None:
    """Refuse a model that these tensor ranks cannot share.

    Args:
        name: of the bundled model.
        architecture: the model's class in transformers.
        sizes: what is split: attention heads and their groups, and the inner dimension of the MLP.
        tensor: number of tensor ranks.

    Raises:
        RequestError: there is no plan for its class, or a size is no multiple of ``tensor``.
    """
    if architecture not in COLUMNS:
        raise RequestError(
            f"--tp splits bundled language models of the classes {', '.join(COLUMNS)}, and '{name}' is a "
            f"{architecture}: leave --tp out"
        )
    for what, size in sizes.items():
        if size % tensor:
            raise RequestError(
                f"'{name}' has {size} {what}, which {tensor} tensor ranks cannot share equally: give --tp a divisor of "
                f"{size}"
            )


def model_of_rank(model: nn.Module, tensor: int, rank: int = 0) -> tuple[nn.Module, Step]:
    """A rank's part of a model, and its step.

    The loss is that of the whole model. The gradients of a rank's loss are of the sum of all ranks' losses; those of
    whole parameters are then summed over the ranks.

    Args:
        model: on meta; changed in place. `check_tensor_ranks` has checked it.
        tensor: number of ranks.
        rank: number of the rank; all of them have the same costs.
    """
    architecture = type(model).__name__
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in COLUMNS[architecture]:
            _split_column(module, tensor)
        elif last in ROWS[architecture]:
            _split_row(module, tensor)
        elif hasattr(module, "split_size"):  # GPT-2's attention cuts query, key and value by it
            module.split_size //= tensor
    place = EMBEDDINGS[architecture]
    embedding = model.get_submodule(place)
    assert isinstance(embedding, nn.Embedding)
    own = ceil(embedding.num_embeddings / (VOCABULARY_MULTIPLE * tensor)) * VOCABULARY_MULTIPLE
    head = model.get_submodule("lm_head")
    tied = head.weight is embedding.weight
    model.set_submodule(place, _EmbeddingOfRank(embedding, own, rank * own))
    weight = model.get_submodule(place).weight if tied else _meta(own, embedding.embedding_dim, head.weight)
    head.weight = weight
    return model, partial(_step_of_rank, rank * own)


def _meta(rows: int, columns: int, like: Tensor | nn.Module) -> nn.Parameter:
    assert isinstance(like, Tensor)
    return nn.Parameter(torch.empty(rows, columns, dtype=like.dtype, device="meta"))


def _is_transposed(module: nn.Module) -> bool:
    """Whether a layer's weight is (input, output), as that of transformers' Conv1D."""
    return not isinstance(module, nn.Linear)


def _split_column(module: nn.Module, tensor: int) -> None:
    """1/t of the output features."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if _is_transposed(module):
        module.weight = _meta(weight.shape[0], weight.shape[1] // tensor, weight)
        module.nf = weight.shape[1] // tensor  # type: ignore[assignment]
    else:
        module.weight = _meta(weight.shape[0] // tensor, weight.shape[1], weight)
    bias = module.bias
    if isinstance(bias, Tensor):
        module.bias = nn.Parameter(torch.empty(bias.shape[0] // tensor, dtype=bias.dtype, device="meta"))


def _split_row(module: nn.Module, tensor: int) -> None:
    """1/t of the input features, and the sum of all ranks' results; the bias is added to the sum."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    if _is_transposed(module):
        module.weight = _meta(weight.shape[0] // tensor, weight.shape[1], weight)
    else:
        module.weight = _meta(weight.shape[0], weight.shape[1] // tensor, weight)
    transposed = _is_transposed(module)

    def forward(x: Tensor) -> Tensor:
        found = x @ (module.weight if transposed else module.weight.t())  # type: ignore[operator]
        whole = ALL_REDUCE(found, SUM)
        return whole if bias is None else whole + module.bias  # type: ignore[no-any-return]

    module.forward = forward


class _EmbeddingOfRank(nn.Module):
    """The embedding of a rank's part of the vocabulary; tokens of other ranks are rows of zeros.

    Args:
        whole: the embedding to split.
        own: number of the rank's tokens.
        first: the first of them.
    """

    def __init__(self, whole: nn.Embedding, own: int, first: int) -> None:
        super().__init__()
        self.weight, self.own, self.first = _meta(own, whole.embedding_dim, whole.weight), own, first

    def forward(self, tokens: Tensor) -> Tensor:
        """The hidden states of tokens."""
        elsewhere = (tokens < self.first) | (tokens >= self.first + self.own)
        rows = nn.functional.embedding((tokens - self.first).masked_fill(elsewhere, 0), self.weight)
        return ALL_REDUCE(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), SUM)  # type: ignore[no-any-return]


def _step_of_rank(first: int, model: nn.Module, batch: Any) -> Tensor:
    """The loss of the next token, from a rank's part of the logits, which begins with token ``first``."""
    tokens = batch["tokens"]
    logits = model(input_ids=tokens).logits
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
