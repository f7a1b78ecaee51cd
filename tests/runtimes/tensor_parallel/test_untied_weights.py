"""Models of transformers whose embedding and head were untied are named in a warning."""

import warnings

import pytest
from panpipe.runtimes.tensor_parallel.recording import warn_of_untied_weights
from torch import nn


class Config:
    tie_word_embeddings = True


class Tied(nn.Module):
    """The parts of a model of transformers that are read."""

    def __init__(self):
        super().__init__()
        self.config = Config()
        self.embedding, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head


def test_untied_weights_are_named():
    model = nn.Sequential(Tied())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_untied_weights(model)
    model[0].head.weight = nn.Parameter(model[0].head.weight.detach().clone())
    with pytest.warns(UserWarning, match=r"^0 has tie_word_embeddings=True, .*two weights.*; tie them again"):
        warn_of_untied_weights(model)
