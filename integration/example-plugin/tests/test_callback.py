from sbp_core.plugins import TrainerControl, TrainerState
from sbp_example_plugin.callback import build
from sbp_example_plugin.plugin import CallbackConfig


def test_the_average_of_the_loss_ends_the_run_and_not_one_good_step() -> None:
    callback = build(CallbackConfig(loss=1.0, decay=0.5))

    asked = [
        callback.on_step_end(TrainerState(step=step), {"loss": loss})
        for step, loss in enumerate((3.0, 0.5, 1.0, 0.4), start=1)
    ]

    assert asked == [None, None, None, TrainerControl(stop="the loss has reached 1.0")]
