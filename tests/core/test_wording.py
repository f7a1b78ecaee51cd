"""Texts for messages: counts, names and modules."""

import pytest
from panpipe.core.wording import counted, first_of, module_text


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "device", "1 device"),
        (2, "device", "2 devices"),
        (0, "stage", "0 stages"),
        (3, "microbatch", "3 microbatches"),
    ],
)
def test_counted_noun_has_a_plural(count, noun, text):
    assert counted(count, noun) == text


def test_first_of_names_some_and_counts_the_others():
    assert first_of(["a"]) == "a"
    assert first_of(["a", "b", "c"]) == "a and 2 more"
    assert first_of(["a", "b", "c", "d"], 3) == "a, b, c and 1 more"
    assert first_of(["a", "b", "c"], 3) == "a, b, c"


def test_module_text_of_a_submodule_and_the_root():
    assert module_text("blocks.0") == "module 'blocks.0'"
    assert module_text("") == "the model"
