"""The conformance suite of callbacks: subclass `CallbackConformance` and supply one method.

    class TestMine(CallbackConformance):
        def make_callback(self):
            return build(MyConfig())

A callback passes even if it requests nothing, or a stop, in the 8 steps of the suite. The tests
take pytest's fixture `tmp_path`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from sbp_core.plugins import Callback, TrainerControl, TrainerState, TrainingContext
from sbp_core.serialize import dump, load

__all__ = ["CallbackConformance"]

#: Steps of the simulated run.
_STEPS = 8


class CallbackConformance(ABC):
    """Tests that every callback must pass. See the module's docstring for how to use it."""

    #: Losses of the steps, and held-out losses after every second of them.
    losses: tuple[float, ...] = (4.0, 3.0, 2.5, 2.2, 2.1, 2.3, 2.6, 3.0)

    @abstractmethod
    def make_callback(self) -> Callback:
        """Return the result of `build(config)`."""

    def test_it_is_a_callback(self) -> None:
        """The trainer refuses anything else."""
        assert isinstance(self.make_callback(), Callback), "it does not derive from Callback"

    def test_it_can_be_led_through_a_run(self, tmp_path: Path) -> None:
        """It returns a value that the trainer accepts, after every step."""
        callback = self.make_callback()
        asked = self._lead(callback, tmp_path)
        callback.on_train_end(self._state(_STEPS))
        assert len(asked) == _STEPS + _STEPS // 2

    def test_two_of_them_ask_for_the_same(self, tmp_path: Path) -> None:
        """Each process of a run has its own callback, and all of them have to agree."""
        folders = [tmp_path / name for name in ("first", "second")]
        for folder in folders:
            folder.mkdir()
        first, second = (self._lead(self.make_callback(), folder) for folder in folders)
        assert first == second

    def test_only_the_first_process_writes(self, tmp_path: Path) -> None:
        """In all other processes the run folder stays unchanged."""
        self._lead(self.make_callback(), tmp_path, is_first=False)
        assert not list(tmp_path.iterdir()), "a process that is not the first wrote files"

    def test_its_state_is_plain_json(self, tmp_path: Path) -> None:
        """Its state is unchanged after a round trip through a checkpoint."""
        callback = self.make_callback()
        self._lead(callback, tmp_path)
        self._saved(callback)

    def test_a_resumed_run_goes_on_as_the_unbroken_one(self, tmp_path: Path) -> None:
        """Stopped after any step and resumed, it makes the same requests in the following steps."""
        for stop in range(1, _STEPS):
            folders = [tmp_path / f"{name}_{stop}" for name in ("whole", "parts")]
            for folder in folders:
                folder.mkdir()
            whole = self.make_callback()
            self._lead(whole, folders[0], stop=stop)
            expected = self._lead(whole, folders[0], start=stop, begins=False)
            before = self.make_callback()
            self._lead(before, folders[1], stop=stop)
            after = self.make_callback()
            if kept := self._saved(before):
                after.load_state_dict(kept)
            assert self._lead(after, folders[1], start=stop) == expected, f"behind step {stop}"

    def _saved(self, callback: Callback) -> Mapping[str, object]:
        """Return the state of a callback as a checkpoint returns it."""
        own = callback.state_dict()
        state = TrainerState(callbacks={"own": own} if own else {})
        read = load(json.loads(json.dumps(dump(state, TrainerState))), TrainerState)
        assert read == state, f"its state is not what JSON makes of it: {own!r}"
        return read.callbacks.get("own", {})

    def _lead(
        self,
        callback: Callback,
        folder: Path,
        *,
        start: int = 0,
        stop: int = _STEPS,
        begins: bool = True,
        is_first: bool = True,
    ) -> list[TrainerControl | None]:
        """Call a callback for some steps; return its requests, also after evaluations."""
        context = TrainingContext(
            folder=folder, is_first=is_first, total_steps=_STEPS, batch_size=4
        )
        if begins:
            callback.on_train_begin(context, self._state(start))
        asked: list[TrainerControl | None] = []
        for step in range(start + 1, stop + 1):
            state, loss = self._state(step), self.losses[step - 1]
            if step % 2 == 0:
                asked.append(callback.on_evaluate(state, {"held_out_loss": loss}))
            asked.append(callback.on_step_end(state, {"loss": loss, "lr": 0.1, "step_s": 0.5}))
        for one in asked:
            assert one is None or isinstance(one, TrainerControl), f"it returned {one!r}"
        return asked

    def _state(self, step: int) -> TrainerState:
        """Return the state of the run after a step."""
        held_out = {number: self.losses[number - 1] for number in range(2, step + 1, 2)}
        best_step = min(held_out, key=held_out.__getitem__, default=None)
        return TrainerState(
            step=step,
            samples=4 * step,
            train_s=0.5 * step,
            best=None if best_step is None else held_out[best_step],
            best_step=best_step,
        )
