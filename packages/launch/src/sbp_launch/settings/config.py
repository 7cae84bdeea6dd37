"""Dataclasses of the settings of one run: before the check (`ComposedConfig`), after (`RunConfig`).

A `RunConfig` has a `TrainerConfig`, and a `PluginChoice` for each group; an `Application` is a
command that takes one. This module does not use Hydra: `check` makes these from Hydra's result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from sbp_core.errors import ConfigError
from sbp_core.plugins import INSTEAD, PluginRegistry
from sbp_launch.checkpoint.settings import CheckpointConfig
from sbp_launch.checks import check_least
from sbp_launch.compile_config import CompileConfig
from sbp_launch.data.order import Order
from sbp_launch.settings.budget import DEFAULT_STEPS, Budget, ScheduleConfig, Unit
from sbp_torch.update_options import UpdateOptions

#: Config groups whose options name a plugin, in the order of a run.
PLUGIN_GROUPS = (
    *("model", "data", "cluster", "boxing", "runtime", "planner", "optimizer", "logger"),
    *("storage", "launcher"),
)

#: All config groups.
GROUPS = (*PLUGIN_GROUPS, "trainer", "compile")

#: The budgets that a run may be given.
_BUDGETS: tuple[Unit, ...] = ("steps", "epochs", "tokens", "hours")

_AT_LEAST_ONE = (
    "steps", "tokens", "batch_size", "micro_batches", "micro_batches_per_update", "log_every",
)  # fmt: skip
_AT_LEAST_ZERO = ("seed", "compare_steps", "sample_tokens", "plan_rows", "prefetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """When and on how much held-out data a run is evaluated.

    Args:
        every: Steps between two evaluations, >= 1; None for one evaluation at the end.
        batches: Number of held-out batches, of `batch_size` samples each; 0 for no evaluation.
    """

    every: int | None = None
    batches: int = 4

    def __post_init__(self) -> None:
        check_least(self, 1, "every")
        check_least(self, 0, "batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginChoice:
    """The chosen option of one group.

    Args:
        name: The name of the plugin.
        settings: The settings for its config, without `name`.
        file: The file of the option, for messages.
    """

    name: str
    settings: Mapping[str, object] = field(default_factory=dict)
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """How long and how a run trains.

    Args:
        steps: Optimizer updates, >= 1; 300 if no budget is given. A budget counts over all
            interruptions, and is one of `steps`, `epochs`, `tokens` and `hours`.
        epochs: Passes over the training data, > 0.
        tokens: Tokens of text to train on, >= 1.
        hours: Time to train, with evaluation and saving, but without planning, > 0.
        batch_size: Samples of one step over all ranks, >= 1.
        micro_batches: Parts of one step; divides `batch_size`. `auto`: the fewest with which every
            rank fits its memory.
        loss: The loss of several micro-batches: `whole_batch`, the loss of the undivided batch;
            `mean_of_micro_batches`, the mean of their losses; or `each_micro_batch`, with an update
            after each micro-batch, or after every few.
        micro_batches_per_update: With `loss=each_micro_batch`: micro-batches of one update, which
            uses the mean of their losses; divides `micro_batches`.
        seed: Seed of the initialisation and of the order of the samples, >= 0.
        init_from: Weights to start from: a checkpoint, a run folder, a file of safetensors, or a
            folder of Hugging Face or torch.distributed.checkpoint; None for the model's own
            initial values.
        order: The order of samples: `shuffled`, in a new order each epoch; or `sequential`.
        prefetch: Batches that are loaded in advance; 0: each batch when the step needs it.
        compare_steps: Number of first steps that also run on one device; 0 for none.
        evaluate: When and on how much held-out data it is evaluated.
        sample_tokens: Tokens generated after training; 0 for none.
        log_every: Steps between two printed lines if there is no progress bar, >= 1; metrics are
            kept for every step.
        dtype: Floating type of parameters and activations.
        plan_rows: The largest number of rows of the printed plan; 0 for no plan.
        on_nan: What to do if the loss is infinite or NaN: `stop`, or `warn` and continue.
        trace: Steps of which a timeline of every rank is kept, counted from 1: `10..12`, or one
            step; None for none.
        trace_operators: Whether the timeline also has each operator of those steps.
        overwrite: Whether a run may replace the files of an earlier one in its folder.
        resume: The checkpoint to continue from: `auto`, the newest complete one of this run folder;
            or the path of a checkpoint, of a folder of them, or of a run. None to start anew.
        allow_other_data: Whether to resume with other data, or another order of them, than the run
            had; at the same number of samples.
        checkpoint: When checkpoints are saved, and which are kept.
        callbacks: Plugins to call between steps: the name of each, or a mapping with `name` and its
            settings.
        schedule: The schedule of the learning rate.
        update: Clipping, averages and scaling in addition to the optimizer.
    """

    FORMER_NAMES: ClassVar[Mapping[str, str]] = {"other_data": "allow_other_data"}
    steps: int | None = None
    epochs: float | None = None
    tokens: int | None = None
    hours: float | None = None
    batch_size: int = 16
    micro_batches: int | Literal["auto"] = 1
    loss: Literal["whole_batch", "mean_of_micro_batches", "each_micro_batch"] = "whole_batch"
    micro_batches_per_update: int = 1
    seed: int = 0
    init_from: str | None = None
    order: Order = "shuffled"
    prefetch: int = 2
    compare_steps: int = 3
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    sample_tokens: int = 200
    log_every: int = 10
    dtype: Literal["float32", "float64"] = field(
        default="float32",
        metadata={
            INSTEAD: "for mixed precision, parameters stay float32: compile.autocast=bfloat16"
        },
    )
    plan_rows: int = 30
    on_nan: Literal["stop", "warn"] = "stop"
    trace: str | int | None = None
    trace_operators: bool = False
    overwrite: bool = False
    resume: str | None = None
    allow_other_data: bool = False
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    callbacks: tuple[str | Mapping[str, Any], ...] = ()
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    update: UpdateOptions = field(default_factory=lambda: UpdateOptions(fused=True))

    def __post_init__(self) -> None:
        check_least(self, 1, *_AT_LEAST_ONE)
        check_least(self, 0, *_AT_LEAST_ZERO)
        self._check_budget()
        if self.micro_batches == "auto" and self.loss == "each_micro_batch":
            raise ConfigError(
                "micro_batches=auto would decide how many updates a step has",
                accepted="a number of micro-batches with loss=each_micro_batch",
                todo="say trainer.micro_batches=NUMBER, or trainer.loss=whole_batch",
            )
        self._check_updates()
        if self.micro_batches != "auto" and self.batch_size % self.micro_batches:
            divisors = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            raise ConfigError(
                f"batch_size={self.batch_size} does not divide into "
                f"micro_batches={self.micro_batches}",
                accepted=f"micro_batches one of {', '.join(map(str, divisors))}",
            )
        traced = self.traced_steps
        last = self.budget.amount if self.budget.unit == "steps" else math.inf
        if self.trace is not None and not (traced and traced[0] >= 1 and traced[-1] <= last):
            steps = "" if last == math.inf else f", of 1 to steps={last}"
            raise ConfigError(
                f"trace={self.trace} names no steps of this run",
                accepted=f"first..last, or one step{steps}",
            )
        if self.trace_operators and self.trace is None:
            raise ConfigError(
                "trace_operators=true without trace: no step is traced",
                accepted="trace_operators=true with trace=first..last",
                todo="choose steps in the middle of the run, such as trainer.trace=5..14",
            )

    def _check_updates(self) -> None:
        each = self.micro_batches_per_update
        if each > 1 and self.loss != "each_micro_batch":
            raise ConfigError(
                f"micro_batches_per_update={each} with loss={self.loss}, which has one update a "
                "step",
                accepted="1, or loss=each_micro_batch",
                todo=f"say trainer.loss=each_micro_batch, or trainer.micro_batches={each} for one "
                "update a step",
            )
        if self.micro_batches != "auto" and self.micro_batches % each:
            divisors = [n for n in range(1, self.micro_batches + 1) if self.micro_batches % n == 0]
            raise ConfigError(
                f"micro_batches={self.micro_batches} does not divide into updates of "
                f"micro_batches_per_update={each}",
                accepted=f"micro_batches_per_update one of {', '.join(map(str, divisors))}",
            )

    def _check_budget(self) -> None:
        """Check that there is at most one budget, and that it is valid.

        Raises:
            ConfigError: there are several, or it is invalid.
        """
        given = [name for name in _BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            texts = [f"{name}={getattr(self, name)}" for name in given]
            raise ConfigError(
                f"{given[0]} is not the only budget: {' and '.join(texts)}",
                accepted=f"one of {', '.join(_BUDGETS)}",
                todo=f"leave out all but one, or say trainer.{given[0]}=null",
            )
        if not 0 < self.budget.amount < math.inf:
            raise ConfigError(
                f"{self.budget.unit}={self.budget.amount} is no budget",
                accepted="a finite number > 0",
            )

    @property
    def budget(self) -> Budget:
        """How long the run trains."""
        for unit in _BUDGETS:
            if (amount := getattr(self, unit)) is not None:
                return Budget(unit=unit, amount=amount)
        return Budget(unit="steps", amount=DEFAULT_STEPS)

    @property
    def callback_choices(self) -> tuple[PluginChoice, ...]:
        """The plugins that `callbacks` names, each with its settings.

        Raises:
            ConfigError: a callback has no name, or two have the same name.
        """
        found: dict[str, PluginChoice] = {}
        for index, given in enumerate(self.callbacks):
            settings = {} if isinstance(given, str) else dict(given)
            name = given if isinstance(given, str) else settings.pop("name", None)
            if not isinstance(name, str) or name in found:
                raise ConfigError(
                    f"callbacks[{index}] has no name"
                    if not isinstance(name, str)
                    else f"callbacks[{index}]: {name!r} is there twice",
                    accepted="the name of a callback, or a mapping with its name and settings, each"
                    " once",
                    todo="such as trainer.callbacks=[{name: early_stop, patience: 3}]",
                )
            found[name] = PluginChoice(name=name, settings=settings)
        return tuple(found.values())

    @property
    def traced_steps(self) -> range:
        """The steps to trace, counted from 1; empty if there are none, or `trace` is invalid."""
        named = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", str(self.trace))
        if named is None:
            return range(0)
        return range(int(named[1]), int(named[2] or named[1]) + 1)

    @property
    def micro_batch_size(self) -> int:
        """Samples of one micro-batch over all ranks."""
        return self.batch_size // self.num_micro_batches

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of a run that is planned already."""
        assert self.micro_batches != "auto", "plan_fitting knows how many there are"
        return self.micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """All checked choices of one run: of each kind of plugin, of the trainer, and of compiling.

    `mesh` and `axes` are the sizes and names of the mesh axes, from the cluster's config.
    """

    model: PluginChoice
    data: PluginChoice
    cluster: PluginChoice
    boxing: PluginChoice
    runtime: PluginChoice
    planner: PluginChoice
    optimizer: PluginChoice
    logger: PluginChoice
    trainer: TrainerConfig
    compile: CompileConfig
    mesh: tuple[int, ...]
    axes: tuple[str, ...]
    launcher: PluginChoice = field(default_factory=lambda: PluginChoice(name="threads"))
    storage: PluginChoice = field(default_factory=lambda: PluginChoice(name="local"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedConfig:
    """A composed config as plain values, not yet checked.

    Args:
        values: The whole config by group.
        files: The file of the chosen option, by group.
        overrides: The overrides of the command line.
        variables: Keys that are set from an environment variable, and how: `${oc.env:LR}`.
    """

    values: Mapping[str, object]
    files: Mapping[str, str]
    overrides: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def overrides_of(self, group: str, what: str = "") -> list[str]:
        """Return the overrides of a group, or of a setting of the primary config, as error context.

        Args:
            group: The name of the group or setting.
            what: The message of the error: only the overrides that it mentions; all if empty.
        """
        # The unknown name may be in the middle of a key: `trainer.updat.fused=null`.
        unknown = what.partition("'")[2].partition("'")[0]
        return [
            f"the command line: {text}"
            for text in self.overrides
            if (key := key_of(text)).partition(".")[0] == group
            # Whether it has the last part of the key, as a separate word.
            and (
                not what
                or re.search(rf"\b{re.escape(key.rpartition('.')[2])}\b", what)
                or key.startswith(f"{unknown}.")
            )
        ]


def key_of(override: str) -> str:
    """Return the key of an override: `trainer.steps` of `+trainer.steps=5`."""
    return re.split("[=@]", override.lstrip("+~"), maxsplit=1)[0].strip()


#: The checked config of an app.
ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Application(Generic[ConfigT]):
    """One command of the command line.

    Args:
        name: Its name: `sbp-train`.
        about: Its description, in one sentence.
        config_name: Its primary config.
        check: Makes its checked config from the composed one; raises `ConfigError`.
        task: Runs the command with the config, the plugins and the run folder, in a Hydra job.
        usage: Further ways to call it, other than with groups and settings.
        groups: The config groups that it has; empty for all.
        may_overwrite: Whether, by its config, it may use a folder that has an earlier run; None for
            a command that leaves no run folder.
        reads_folder_alone: Whether only this process, of those started together, reads the run
            folder.
        sweep_goes_on: Whether a sweep continues after a failed run, and ends with a table of runs.
    """

    name: str
    about: str
    config_name: str
    check: Callable[[ComposedConfig, PluginRegistry], ConfigT]
    task: Callable[[ConfigT, PluginRegistry, Path], None]
    usage: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    may_overwrite: Callable[[ConfigT], bool] | None = None
    reads_folder_alone: bool = True
    sweep_goes_on: bool = False
