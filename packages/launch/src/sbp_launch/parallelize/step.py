"""The parallel step: what `parallelize` returns, and what a training loop calls."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from rich.console import Console
from torch import Tensor, nn

from sbp_core.compile import PhysicalPlan
from sbp_core.errors import ConfigError, RunError, SbpValueError
from sbp_core.graph import InputKind, LogicalGraph
from sbp_core.runtime import Session
from sbp_core.strategy import Strategy
from sbp_launch.parallelize.engine import Engine
from sbp_launch.parallelize.forward import Forwards
from sbp_launch.parallelize.joining import join
from sbp_launch.parallelize.output import StepOutput
from sbp_launch.parallelize.program import OneDeviceProgram
from sbp_launch.parallelize.saved import read_folder, write_folder
from sbp_launch.plan_output import print_plan
from sbp_launch.planning import Planned
from sbp_launch.world import World
from sbp_torch.capture import current_scalars, flatten_batch
from sbp_torch.interchange.torch_states import to_model_state, to_optimizer_state
from sbp_torch.optim import note_step

logger = logging.getLogger(__name__)

#: Settings of parameter groups that are inputs of a step only if `UpdateOptions.scheduled` says so.
_CAPTURED = ("weight_decay", "momentum", "betas")


class ParallelStep:
    """A training step on all ranks: call it with a batch, inside a `with` block.

    Made by `parallelize`. Several processes, one a rank, make the same calls in the same order.

    Attributes:
        world: This process among all: `step.world.rank == 0` is where one prints.
    """

    def __init__(
        self,
        program: OneDeviceProgram,
        planned: Planned,
        engine: Engine,
        degree: int,
        states: Mapping[str, Tensor] | None,
    ) -> None:
        self.world: World = engine.world
        self._program, self._planned, self._engine = program, planned, engine
        self._given_states = states
        self._forwards = Forwards(program, planned, engine, degree)
        self._session: Session | None = None
        self._first_step, self._updates, self._is_over = 0, True, False
        self._scalars = current_scalars(program.optimizer, program.update).keys()
        self._settings_then = self._group_settings()
        count = planned.graph.num_micro_batches
        self._shapes = {
            entry.name: (shape[0] * count // (degree if engine.is_local else 1), *shape[1:])
            for entry in planned.graph.inputs
            if entry.kind is InputKind.BATCH and (shape := planned.graph.tensor(entry.name).shape)
        }

    # Life.

    def start(self) -> ParallelStep:
        """Start the ranks; `with` does it. To be ended by `close()`.

        Raises:
            RunError: it was started before.
            ConfigError: the ranks have different programs; names the difference.
        """
        if self._session is not None or self._is_over:
            raise RunError(
                "this parallel step was started before",
                accepted="one `with` block for each call of parallelize",
                todo="call parallelize again; step.state_dict() has the states, which it takes as "
                "states=...",
            )
        backend = self._engine.make_backend()
        states = self._program.first_states(self._given_states)
        session = self._engine.runtime.start(self._planned.plan, states, backend)
        try:
            join(session, backend, self._planned, self._engine, self._program, states)
        except BaseException as error:
            session.__exit__(type(error), error, error.__traceback__)
            raise
        self._session, self._given_states = session, None
        return self

    def close(self) -> None:
        """End the ranks. Safe to call twice; what this process' ranks hold can still be read."""
        self._close(None)

    def __enter__(self) -> ParallelStep:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        self._is_over = True
        try:
            self._forwards.close(error)
        finally:
            if self._session is not None:
                # Ranks of other processes are told of an error that ends the block.
                self._session.__exit__(type(error) if error else None, error, None)

    @property
    def session(self) -> Session:
        """The started plan.

        Raises:
            RunError: it is not started.
        """
        if self._session is None:
            raise RunError(
                "this parallel step is not started",
                todo="use it in a `with` block: with parallelize(...) as step; or call start()",
            )
        return self._session

    # Steps.

    def __call__(self, batch: Any, /, **scalars: float) -> StepOutput:
        """Take one step: forward, backward and update of all micro-batches.

        Args:
            batch: Of the form, shapes and dtypes of the example given to `parallelize`.
            scalars: Settings of the update for this step: `lr`, for all parameter groups, or
                `**{"lr.1": 0.1}` for one; and those of `UpdateOptions.scheduled`. What is left out
                is what the optimizer's groups say now, so schedulers of `torch.optim` just work.

        Raises:
            SbpValueError: the batch does not fit, or there is no such scalar.
            RunError: a rank failed; or the step is not started, or over.
        """
        flat = self._checked(batch) if self._updates else flatten_batch(batch)
        if not self._updates:
            if scalars:
                raise SbpValueError(
                    f"{next(iter(scalars))}= is a setting of the update, and step.no_update() "
                    "leaves that out"
                )
            return self._forward(batch, in_evaluation=False)
        values: dict[str, float] = {**self._update_scalars(scalars), **self._draws()}
        found = StepOutput.of(self._step(flat, values))
        note_step(self._program.optimizer)
        return found

    def _step(self, flat: Mapping[str, Tensor], values: Mapping[str, float]) -> Any:
        return self.session.step(flat, values)

    def evaluate(self, batch: Any, /) -> StepOutput:
        """Return loss and metrics of a batch in evaluation mode; nothing changes.

        Args:
            batch: Of any size. The first one of each size is captured and planned.
        """
        return self._forward(batch, in_evaluation=True)

    @contextmanager
    def no_update(self) -> Iterator[None]:
        """Let steps inside the `with` block return their loss and change nothing.

        The model stays in the mode in which it trains. Gradients are not accumulated over steps: a
        plan is one whole step, with the update in it, and `micro_batches=` accumulates inside it.
        """
        before, self._updates = self._updates, False
        try:
            yield
        finally:
            self._updates = before

    def _forward(self, batch: Any, *, in_evaluation: bool) -> StepOutput:
        result = self._forwards.step(
            self.session, batch, self._draws(), in_evaluation=in_evaluation
        )
        return StepOutput.of(result)

    def _draws(self) -> dict[str, float]:
        """Return what random numbers are counted with."""
        return {"seed": self._engine.seed, "step": self.steps_done}

    def _update_scalars(self, given: Mapping[str, float]) -> dict[str, float]:
        """Return every scalar of the update: those given, and what the optimizer says now.

        Raises:
            SbpValueError: one is given that there is not; or a group's setting has changed that is
                no input of the step.
        """
        now = current_scalars(self._program.optimizer, self._program.update)
        for name, value in given.items():
            meant = [own for own in now if own == name or own.rpartition(".")[0] == name]
            if not meant:
                raise SbpValueError(
                    f"the update has no scalar {name!r}",
                    accepted=", ".join(now),
                    todo="weight_decay, momentum, beta1 and beta2 are scalars if they are named in "
                    "update=UpdateOptions(scheduled=(...))",
                )
            now |= dict.fromkeys(meant, float(value))
        changed = self._group_settings()
        if changed != self._settings_then:
            raise self._changed_setting(changed)
        return now

    def _group_settings(self) -> list[dict[str, Any]]:
        """Return the settings of parameter groups that the captured step has as constants."""
        scheduled = self._program.update.scheduled
        betas = {"beta1", "beta2"}
        kept = [
            key
            for key in _CAPTURED
            if key not in scheduled and not (key == "betas" and betas & {*scheduled})
        ]
        return [
            {key: group[key] for key in kept if key in group}
            for group in self._program.optimizer.param_groups
        ]

    def _changed_setting(self, now: list[dict[str, Any]]) -> SbpValueError:
        number, key = next(
            (number, key)
            for number, (one, other) in enumerate(zip(self._settings_then, now, strict=True))
            for key in one
            if one[key] != other[key]
        )
        names = '"beta1", "beta2"' if key == "betas" else f'"{key}"'
        return SbpValueError(
            f"{key} of parameter group {number} is {now[number][key]} now, and was "
            f"{self._settings_then[number][key]} when the step was captured",
            where="the optimizer",
            accepted="a change of lr, and of what is scheduled",
            todo=f"pass update=UpdateOptions(scheduled=({names},)) to parallelize",
        )

    def _checked(self, batch: Any) -> dict[str, Tensor]:
        """Return a batch by name.

        Raises:
            SbpValueError: it has another number of samples than every step.
        """
        flat = flatten_batch(batch)
        for name, wanted in self._shapes.items():
            value = flat.get(name)
            if value is None or value.dim() != len(wanted) or tuple(value.shape) == wanted:
                continue
            if tuple(value.shape[1:]) == wanted[1:]:
                raise SbpValueError(
                    f"{name!r} has {value.shape[0]} samples, and every step takes {wanted[0]}"
                    + (" of each process" if self._engine.is_local and self.world.size > 1 else ""),
                    where="batch",
                    accepted=f"shape {wanted}",
                    todo="leave out the last, smaller batch: DataLoader(..., drop_last=True); "
                    "step.evaluate takes any size",
                )
        return flat

    # States.

    @property
    def steps_done(self) -> int:
        """Steps taken, those before a `load` included."""
        return self._first_step + (0 if self._session is None else self._session.steps_done)

    def state_dict(self, *, to: int | None = None) -> dict[str, Tensor]:
        """Return every state as a whole tensor, a copy: parameters, buffers, optimizer states.

        Args:
            to: The rank whose process gets them; all if None. Elsewhere there are none.
        """
        return self.session.state_dict(to=to)

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """Replace every state by what `state_dict` returned, perhaps of another mesh."""
        self.session.load_state_dict(states)
        self._forwards.forget()

    def model_state_dict(self) -> dict[str, Any]:
        """Return what `model.load_state_dict` takes: whole tensors on all ranks."""
        return to_model_state(self.state_dict(), self._program.model)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return what `optimizer.load_state_dict` takes: whole tensors on all ranks."""
        program = self._program
        return to_optimizer_state(self.state_dict(), program.model, program.optimizer)

    def copy_to(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Load what was trained into a model, and into an optimizer over its parameters.

        Args:
            model: Of the same form, with values: the one given to `parallelize`, or another.
            optimizer: Likewise.
        """
        states = self.state_dict()
        model.load_state_dict(to_model_state(states, model))
        if optimizer is not None:
            optimizer.load_state_dict(to_optimizer_state(states, model, optimizer))

    def save(self, folder: str | Path) -> None:
        """Write states, strategy and plan into a folder; all processes call it, rank 0 writes.

        Raises:
            RunError: they cannot be written.
        """
        states = self.state_dict(to=0)
        if self.world.rank == 0:
            write_folder(Path(folder), states, self._planned, self.steps_done, self._engine.seed)

    def load(self, folder: str | Path) -> None:
        """Go on from what `save` left, perhaps of another mesh; all processes call it.

        Raises:
            ConfigError: the folder holds no such files, or was written with another seed.
        """
        saved = read_folder(Path(folder))
        if saved.seed != self._engine.seed:
            raise ConfigError(
                f"{folder} was written with seed={saved.seed}, and this is "
                f"seed={self._engine.seed}",
                todo=f"pass seed={saved.seed} to parallelize",
            )
        self.load_state_dict(saved.states)
        self._first_step = saved.steps_done - self.session.steps_done

    # The plan.

    @property
    def graph(self) -> LogicalGraph:
        """The captured step."""
        return self._planned.graph

    @property
    def strategy(self) -> Strategy:
        """How every tensor is stored and every operator split."""
        return self._planned.strategy

    @property
    def plan(self) -> PhysicalPlan:
        """What every rank runs."""
        return self._planned.plan

    def report(self, file: TextIO | None = None, *, max_rows: int = 30) -> None:
        """Print the plan as `sbp-plan` does: layouts, what is sent, time, memory. On rank 0 only.

        Args:
            file: Where; standard output if None.
            max_rows: Most rows of its table; 0 for no table.
        """
        if self.world.rank != 0:
            return
        out = file or sys.stdout
        console = Console(file=out, width=None if out.isatty() else 100)
        mesh = self._engine.settings.mesh
        sizes = dict(zip(mesh.axes, mesh.mesh_shape, strict=True))
        print_plan(console, self._planned, sizes, max_rows, "raise max_rows to see them")

    def __repr__(self) -> str:
        state = "over" if self._is_over else "not started" if self._session is None else "started"
        return f"<ParallelStep on {self._engine.settings.mesh}, {state}>"
