"""Make, call and restore the callbacks of a run; combine their requests to stop, evaluate, save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from sbp_core.errors import ConfigError
from sbp_core.plugins import Callback, TrainerControl, TrainerState
from sbp_launch.run.run import Run


def make_callbacks(run: Run) -> dict[str, Callback]:
    """Return the callbacks of `trainer.callbacks` by name, in their order.

    Raises:
        PluginError: a plugin returns something else.
    """
    found: dict[str, Callback] = {}
    for choice in run.config.trainer.callback_choices:
        made = run.registry.make("callback", choice.name, choice.settings)
        if not isinstance(made, Callback):
            raise run.registry.entry("callback", choice.name).returned(made, "a Callback")
        found[choice.name] = made
    return found


def ask(
    run: Run,
    callbacks: Mapping[str, Callback],
    method: Literal["on_step_end", "on_evaluate"],
    state: TrainerState,
    metrics: Mapping[str, float],
) -> TrainerControl:
    """Call a method of all callbacks of a run; return their combined requests.

    Raises:
        PluginError: one returns something else, or raises an error other than `SbpError`.
    """
    controls: list[TrainerControl | None] = []
    for name, callback in callbacks.items():
        entry = run.registry.entry("callback", name)
        with entry.called(method):
            found = getattr(callback, method)(state, metrics)
        if not (found is None or isinstance(found, TrainerControl)):
            raise entry.returned(found, "a TrainerControl or None", by=method)
        controls.append(found)
    return together(controls)


def together(controls: Iterable[TrainerControl | None]) -> TrainerControl:
    """Return the combined requests of several callbacks; the first that stops gives the reason."""
    asked = [one for one in controls if one is not None]
    return TrainerControl(
        stop=next((one.stop for one in asked if one.stop), ""),
        evaluate=any(one.evaluate for one in asked),
        save=any(one.save for one in asked),
    )


def restore(callbacks: Mapping[str, Callback], state: TrainerState) -> None:
    """Restore callbacks from a checkpoint; callbacks that it does not have start afresh.

    Raises:
        ConfigError: a callback cannot use the saved state.
    """
    for name, callback in callbacks.items():
        kept = state.callbacks.get(name)
        if kept is None:
            continue
        try:
            callback.load_state_dict(kept)
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the callback {name!r} cannot continue from {dict(kept)}: {error}",
                accepted="the state that it has saved",
                todo=f"resume from another checkpoint, or without the callback {name}",
            ) from error
