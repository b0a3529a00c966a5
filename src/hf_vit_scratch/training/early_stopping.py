"""The end of a run whose validation metric improves no more."""

from typing import Any

from transformers import EarlyStoppingCallback


class EarlyStopping(EarlyStoppingCallback):
    """The stock callback, but the evaluations it has counted count on in a resumed run."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take over the count of the run; one that has ended does not go on."""
        super().on_train_begin(args, state, control, **kwargs)
        # The Trainer's `restore_callback_states_from_checkpoint` would also restore that the run was to stop.
        self.early_stopping_patience_counter = state.stateful_callbacks[type(self).__name__]["attributes"][
            "early_stopping_patience_counter"
        ]
        control.should_training_stop = self.early_stopping_patience_counter >= self.early_stopping_patience
