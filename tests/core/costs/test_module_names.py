"""Stages in the model's own words."""

from panpipe.core.costs.module_names import module_ranges

LAYER = ("ln_1/layer_norm", "attn.c_attn/addmm", "attn/cat", "mlp.c_fc/addmm")
NAMES = [
    "transformer.wte/embedding",
    "transformer/add",
    *(name for i in range(3) for name in (*(f"transformer.h.{i}.{part}" for part in LAYER), f"transformer.h.{i}/add")),
    "transformer.ln_f/layer_norm",
    "lm_head/linear",
    "/cross_entropy_loss",
]


def cut(*places):
    return module_ranges([NAMES[a:b] for a, b in zip((0, *places), (*places, len(NAMES)), strict=True)])


def test_module_range_of_a_stage_has_its_first_and_last_module():
    assert cut(7) == ("transformer.wte … transformer.h.0", "transformer.h.1 … cross_entropy_loss")
    assert cut(5, 17) == (
        "transformer.wte … transformer.h.0.attn",
        "transformer.h.0.mlp … transformer.h.2",
        "transformer.ln_f … cross_entropy_loss",
    )


def test_a_cut_inside_a_module_names_the_operator():
    assert cut(4, 6)[1] == "transformer.h.0.attn/cat … transformer.h.0.mlp"
    assert cut(6, 7)[1] == "transformer.h.0/add"


def test_module_range_of_a_whole_module_is_its_name():
    assert cut(2, 7, 12)[1:3] == ("transformer.h.0", "transformer.h.1")


def test_names_without_operators_are_modules():
    assert module_ranges([["embed", "l0.ln1", "l0.qkv"], ["l0.proj", "l1.ln1", "loss"]]) == (
        "embed … l0.qkv",
        "l0.proj … loss",
    )
    assert module_ranges([["l0.a", "l0.b"], []]) == ("l0", "nothing")
