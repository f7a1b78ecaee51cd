"""`PanpipeTrainer` against Trainer in one process: losses, logs, weights, evaluation, checkpoints and resuming."""

import copy

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.integrations.transformers import PanpipeTrainer
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from ..laws.grouped import grouped

pytestmark = pytest.mark.filterwarnings("default")  # of transformers
PIPELINE = grouped(microbatches=4, schedule="1f1b", max_chunks=1, progress=False)
_plans = []


def pipeline():
    """Options of the pipeline; those after the first one take its plan."""
    return grouped(plan=_plans[0], progress=False) if _plans else PIPELINE


def ended(trainer):
    _plans[:] = _plans or [trainer.pipe.plan]
    trainer.end()


CONFIG = {
    "vocab_size": 61, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


def samples(count, seed=0):
    """Rows of which some have many labels without a loss, so that microbatches have unequal numbers of tokens."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        ids = torch.randint(61, (12,), generator=draw)
        labels = ids.clone()
        labels[: (number * 5) % 12] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def model_of(kind=GPT2LMHeadModel, **more):
    torch.manual_seed(0)
    return kind(GPT2Config(**CONFIG, **more)).double()


def arguments(folder, **more):
    given = {
        "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "max_steps": 4, "learning_rate": 1e-2,
        "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "weight_decay": 0.1, "warmup_steps": 2,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**given, **more})


def logged(trainer, *names):
    return [[entry[name] for name in names] for entry in trainer.state.log_history if names[0] in entry]


def assert_same_weights(found, wanted, tolerance=1e-6):
    expected = dict(wanted.named_parameters())
    for name, parameter in found.named_parameters():
        assert (parameter - expected[name]).norm() <= tolerance * expected[name].norm(), name


def both(folder, model, data, trainer_options=None, **more):
    """Trainer in one process, and the pipeline, after the same training."""
    options = trainer_options or {}
    alone = Trainer(copy.deepcopy(model), arguments(folder / "alone", **more), train_dataset=data, **options)
    alone.train()
    piped = PanpipeTrainer(
        model, arguments(folder / "piped", **more), train_dataset=data, pipeline=pipeline(), **options
    )
    piped.train()
    return alone, piped


def test_trainer_logs_and_weights_equal_those_of_one_process(tmp_path):
    """Microbatches have unequal numbers of tokens: gradients must not be too large by them (torchtitan#2972)."""
    alone, piped = both(tmp_path, model_of(), samples(40))
    names = "loss", "grad_norm", "learning_rate", "epoch"
    torch.testing.assert_close(logged(piped, *names), logged(alone, *names), rtol=2e-5, atol=1e-7)
    assert_same_weights(piped.model, alone.model)
    ended(piped)


@pytest.mark.slow
def test_trainer_accumulates_batches_of_unequal_numbers_of_tokens(tmp_path):
    alone, piped = both(tmp_path, model_of(), samples(44), gradient_accumulation_steps=3, max_steps=3)
    torch.testing.assert_close(
        logged(piped, "loss", "grad_norm"), logged(alone, "loss", "grad_norm"), rtol=2e-5, atol=1e-7
    )
    assert_same_weights(piped.model, alone.model)
    ended(piped)


@pytest.mark.slow
def test_texts_that_the_collator_pads_take_one_capture(tmp_path, monkeypatch):
    captures, export = [], torch.export.export
    monkeypatch.setattr(
        torch.export, "export", lambda *args, **kwargs: captures.append(args) or export(*args, **kwargs)
    )

    def collator(rows):
        ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
        return {"input_ids": ids, "labels": ids.where(ids > 0, -100)}

    data = [{"input_ids": each["input_ids"][: 3 + number % 10]} for number, each in enumerate(samples(40))]
    made, _plans[:] = _plans[:], []
    alone, piped = both(tmp_path, model_of(), data, {"data_collator": collator}, per_device_train_batch_size=4)
    _plans[:] = made
    torch.testing.assert_close(
        logged(piped, "loss", "grad_norm"), logged(alone, "loss", "grad_norm"), rtol=2e-5, atol=1e-7
    )
    assert len(captures) == 1
    piped.end()


def accuracy(evaluated):
    hits = (evaluated.predictions.argmax(-1) == evaluated.label_ids)[evaluated.label_ids != -100]
    return {"accuracy": float(hits.mean())}


@pytest.mark.slow
def test_trainer_evaluates_saves_and_resumes_as_one_process_does(tmp_path):
    more = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    data = {"train_dataset": samples(40), "eval_dataset": samples(13, seed=1), "compute_metrics": accuracy}
    alone = Trainer(model_of(), arguments(tmp_path / "alone", **more), **data)
    alone.train()
    piped = PanpipeTrainer(model_of(), arguments(tmp_path / "piped", **more), **data, pipeline=pipeline())
    piped.train()
    names = "eval_loss", "eval_accuracy"
    torch.testing.assert_close(logged(piped, *names), logged(alone, *names), rtol=2e-5, atol=1e-7)
    ended(piped)

    last = tmp_path / "piped" / "checkpoint-4"
    assert_same_weights(GPT2LMHeadModel.from_pretrained(last), alone.model)

    resumed = PanpipeTrainer(model_of(), arguments(tmp_path / "piped", **more), **data, pipeline=pipeline())
    resumed.train(resume_from_checkpoint=str(tmp_path / "piped" / "checkpoint-2"))
    assert logged(resumed, "loss", "learning_rate") == logged(piped, "loss", "learning_rate")
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, dict(piped.model.named_parameters())[name]), name
    ended(resumed)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"fp16": True}, "fp16"),
        ({"gradient_checkpointing": True}, "recompute"),
        ({"torch_compile": True}, "compile"),
        ({"load_best_model_at_end": True, "save_only_model": True, "metric_for_best_model": "loss"}, "save_only_model"),
    ],
)
def test_trainer_refuses_arguments_without_a_meaning_for_a_pipeline(tmp_path, options, field):
    with pytest.raises(RequestError, match=field):
        PanpipeTrainer(model_of(), arguments(tmp_path, **options), train_dataset=samples(8))


def test_trainer_refuses_options_that_its_arguments_have(tmp_path):
    with pytest.raises(RequestError, match=r"'clip_norm'.*max_grad_norm"):
        PanpipeTrainer(model_of(), arguments(tmp_path), train_dataset=samples(8), pipeline=grouped(clip_norm=1.0))


def mean_over_labels(outputs, labels):
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, ignore_index=-100)


def mean_over_rows(outputs, labels):
    each = nn.functional.cross_entropy(outputs.logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return (each.sum(1) / labels.ne(-100).sum(1)).mean()


def no_mean(outputs, labels):
    return outputs.logits.std() * outputs.logits.abs().sum()


def with_loss(trainer, loss):
    """A Trainer with its own ``compute_loss``, which ignores ``num_items_in_batch``."""

    class Own(trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            rest = {name: value for name, value in inputs.items() if name != "labels"}
            outputs = model(**rest)
            found = loss(outputs, inputs["labels"])
            return (found, outputs) if return_outputs else found

    return Own


@pytest.mark.slow
@pytest.mark.parametrize("loss", [mean_over_labels, mean_over_rows])
def test_own_loss_has_the_weights_of_its_mean(tmp_path, loss):
    """Microbatches have unequal numbers of labels, and the door finds out which mean it is."""
    alone = with_loss(Trainer, loss)(model_of(), arguments(tmp_path / "alone"), train_dataset=samples(40))
    alone.train()
    piped = with_loss(PanpipeTrainer, loss)(
        model_of(), arguments(tmp_path / "piped"), train_dataset=samples(40), pipeline=PIPELINE
    )
    piped.train()
    torch.testing.assert_close(
        logged(piped, "loss", "grad_norm"), logged(alone, "loss", "grad_norm"), rtol=2e-5, atol=0
    )
    assert_same_weights(piped.model, alone.model)
    piped.end()


@pytest.mark.parametrize(
    ("loss", "more", "line"),
    [
        (no_mean, {}, "not the mean of those of its parts"),
        (mean_over_labels, {"gradient_accumulation_steps": 2}, "ignores num_items_in_batch.*means of the 2 batches"),
    ],
)
def test_own_loss_that_cannot_be_right_is_refused(tmp_path, loss, more, line):
    trainer = with_loss(PanpipeTrainer, loss)(model_of(), arguments(tmp_path, **more), train_dataset=samples(16))
    with pytest.raises(RequestError, match=line):
        trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("more", [
    {"label_smoothing_factor": 0.1},
    {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 3, "max_steps": 3},
    {"bf16": True},
    {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "greater_is_better": True,
     "load_best_model_at_end": True, "metric_for_best_model": "loss", "warmup_steps": 0},
], ids=["smoothing", "smoothing, accumulated", "bf16", "best model"])  # fmt: skip
def test_features_of_trainer_equal_those_of_one_process(tmp_path, more):
    """The best model, which is loaded at the end, is that of the greatest loss, and not the last one."""
    model = model_of().float() if "bf16" in more else model_of()
    made, _plans[:] = _plans[:], []
    alone, piped = both(tmp_path, model, samples(44), {"eval_dataset": samples(13, seed=1)}, **more)
    _plans[:] = made
    tolerance = 2e-2 if "bf16" in more else 2e-5
    torch.testing.assert_close(
        logged(piped, "loss", "grad_norm"), logged(alone, "loss", "grad_norm"), rtol=tolerance, atol=1e-7
    )
    if "bf16" not in more:
        assert_same_weights(piped.model, alone.model, 1e-5)
    if "load_best_model_at_end" in more:
        assert piped.state.best_global_step == alone.state.best_global_step < 4
    piped.end()


@pytest.mark.slow
def test_trainer_trains_and_writes_an_adapter_as_one_process_does(tmp_path):
    adapter = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(model_of(), adapter).double()
    made, _plans[:] = _plans[:], []
    alone, piped = both(tmp_path, model, samples(40), save_strategy="steps", save_steps=4)
    _plans[:] = made
    assert_same_weights(piped.model, alone.model)
    file = "checkpoint-4/adapter_model.safetensors"
    found, wanted = load_file(tmp_path / "piped" / file), load_file(tmp_path / "alone" / file)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-8)
    piped.end()
