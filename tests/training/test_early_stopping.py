"""The end of a run whose validation metric improves no more."""

import pytest
from test_trainer import make_trainer
from transformers import TrainerCallback

from hf_vit_scratch.errors import UserError
from hf_vit_scratch.training.arguments import ViTTrainingArguments


@pytest.fixture
def trainer(tmp_path):
    """Makes a trainer that learns nothing, so that its first evaluation is its best."""

    def make():
        return make_trainer(
            tmp_path, max_steps=9, learning_rate=0.0, early_stopping_patience=2, eval_strategy="steps", eval_steps=1,
            save_strategy="steps", save_steps=1,
        )  # fmt: skip

    return make


def test_run_stops_after_so_many_evaluations_without_a_better_one(trainer):
    stopped = trainer()
    for _ in range(2):  # as in a search for hyperparameters
        stopped.train()
        assert stopped.state.global_step == 1 + 2


@pytest.mark.parametrize("step", [2, 3])
def test_resumed_run_stops_where_the_undisturbed_one_does(trainer, step, tmp_path, caplog):
    trainer().train()
    resumed = trainer()
    with caplog.at_level("INFO"):
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert ("That run is finished: nothing is left to train." in caplog.text) == (step == 3)
    assert resumed.state.global_step == 3
    assert len([line for line in resumed.state.log_history if "eval_loss" in line]) == 3


class StopAtOnce(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        control.should_training_stop = True


def test_stop_that_a_callback_asks_for_holds_in_a_resumed_run(trainer, tmp_path):
    trainer().train()
    resumed = trainer()
    resumed.add_callback(StopAtOnce)
    resumed.callback_handler.callbacks.insert(0, resumed.callback_handler.callbacks.pop())  # as given to the trainer
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 2


def test_patience_can_be_added_on_resuming(trainer, tmp_path):
    make_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1).train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.state.global_step == 1 + 1 + 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"early_stopping_patience": 0}, r"^early_stopping_patience must be at least 1, got 0\.$"),
        (
            {"early_stopping_patience": 3, "eval_strategy": "no", "load_best_model_at_end": False},
            r"^early_stopping_patience needs evaluations: give --eval_strategy steps or epoch\.",
        ),
        (
            {"early_stopping_patience": 3, "eval_strategy": "epoch", "eval_on_start": True},
            r"^early_stopping_patience would count eval_on_start at each resumption\. Leave one out\.",
        ),
    ],
)
def test_early_stopping_that_could_not_work_is_refused(options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        ViTTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)
