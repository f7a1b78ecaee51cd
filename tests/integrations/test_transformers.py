"""`PanpipeTrainer` against Trainer in one process: losses, logs, weights, evaluation, checkpoints and resuming."""

import copy

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.integrations.transformers import PanpipeTrainer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

pytestmark = pytest.mark.filterwarnings("default")  # of transformers
PIPELINE = {"microbatches": 4, "schedule": "1f1b", "max_chunks": 1, "progress": False, "plan_seconds": 0.1}
_plans = []


def pipeline():
    """Options of the pipeline; those after the first one take its plan."""
    return {"plan": _plans[0], "progress": False} if _plans else PIPELINE


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
        PanpipeTrainer(model_of(), arguments(tmp_path), train_dataset=samples(8), pipeline={"clip_norm": 1.0})
