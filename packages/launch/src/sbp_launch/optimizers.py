"""The optimizers of sbp-launch: their settings, and factories of `torch.optim` optimizers.

Torch is imported when an optimizer is made, so settings are checked without it. Every config has
`groups`, which map patterns of parameter names to other settings, such as
`{"*.bias": {"weight_decay": 0.0}}`; the first pattern that matches a name counts. A pattern that
matches no parameter is an error when the optimizer is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from sbp_core.errors import ConfigError
from sbp_launch.settings.patterns import check_patterns

if TYPE_CHECKING:
    import torch

    from sbp_torch.kinds import OptimizerFactory

#: Pattern of parameter names -> settings of these parameters.
Groups = Mapping[str, Mapping[str, float | bool]]

#: Accepted ranges: the lowest number, the exclusive upper bound, and both in words.
_POSITIVE = (5e-324, float("inf"), "a finite number > 0")
_AT_LEAST_ZERO = (0.0, float("inf"), "a finite number >= 0")
_FRACTION = (0.0, 1.0, "a number in [0, 1)")

#: Range of each setting; the type of settings that are not listed is checked elsewhere.
_RANGES = {
    "lr": _POSITIVE,
    "eps": _POSITIVE,
    "weight_decay": _AT_LEAST_ZERO,
    "momentum": _FRACTION,
    "dampening": _FRACTION,
    "lr_decay": _AT_LEAST_ZERO,
    "initial_accumulator_value": _AT_LEAST_ZERO,
    "alpha": _FRACTION,
    "trust": _POSITIVE,
    "d": _POSITIVE,
    "adamw_lr": _POSITIVE,
    "adamw_weight_decay": _AT_LEAST_ZERO,
}


def _check_range(name: str, value: float, low: float, below: float, accepted: str) -> None:
    # In this form, NaN is refused, too: it compares as false with everything.
    if not low <= value < below:
        raise ConfigError(f"{name}={value!r} is out of range", accepted=accepted)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Settings that all optimizers share.

    Args:
        lr: Learning rate, > 0.
        weight_decay: Weight decay, >= 0.
        groups: Other numbers and flags for the parameters whose names match a pattern.
    """

    lr: float = 1e-3
    weight_decay: float = 0.0
    groups: Groups = field(default_factory=dict)

    #: Settings that must not be in `groups`.
    OF_OTHERS: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in _RANGES:
                _check_range(entry.name, value, *_RANGES[entry.name])
        for beta in getattr(self, "betas", ()):
            _check_range("betas", beta, 0.0, 1.0, "two numbers in [0, 1)")
        known = {
            entry.name
            for entry in fields(self)
            if entry.name in _RANGES or isinstance(entry.default, bool)
        } - set(self.OF_OTHERS)
        for pattern, settings in self.groups.items():
            for name in settings:
                if name not in known:
                    raise ConfigError(
                        f"groups.{pattern}: no setting is called {name!r}",
                        accepted=", ".join(sorted(known)),
                    )
            changes: Any = settings
            try:
                replace(self, groups={}, **changes)
            except ConfigError as error:
                raise error.replaced(
                    ConfigError, what=f"groups.{pattern}: {error.what}", where=""
                ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamConfig(OptimizerConfig):
    """Settings of `torch.optim.Adam`; see `OptimizerConfig`.

    Args:
        betas: Decay of the mean and of the mean square, each in [0, 1).
        eps: Added to the root of the mean square, > 0.
        amsgrad: Divide by the largest mean square so far.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig(AdamConfig):
    """Settings of `torch.optim.AdamW`: as `AdamConfig`, but the weight decay is decoupled."""

    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdConfig(OptimizerConfig):
    """Settings of `torch.optim.SGD`; see `OptimizerConfig`.

    Args:
        momentum: Decay of the velocity, in [0, 1); 0 keeps none.
        dampening: Fraction of each gradient that does not enter the velocity, in [0, 1).
        nesterov: Look ahead; needs momentum and no dampening.
    """

    lr: float = 0.1
    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        if self.nesterov and (not self.momentum or self.dampening):
            raise ConfigError(
                f"nesterov=True with momentum={self.momentum}, dampening={self.dampening}",
                accepted="momentum > 0 and dampening 0",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdagradConfig(OptimizerConfig):
    """Settings of `torch.optim.Adagrad`; see `OptimizerConfig`.

    Args:
        lr_decay: Decay of the learning rate with the steps, >= 0.
        initial_accumulator_value: First sum of squares, >= 0.
        eps: Added to the root of the sum of squares, > 0.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWiseAdagradConfig(AdagradConfig):
    """Settings of `sbp_torch.optim.RowWiseAdagrad`; see `AdagradConfig`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RmspropConfig(OptimizerConfig):
    """Settings of `torch.optim.RMSprop`; see `OptimizerConfig`.

    Args:
        alpha: Decay of the mean square, in [0, 1).
        eps: Added to the root of the mean square, > 0.
        momentum: Decay of the velocity, in [0, 1); 0 keeps none.
        centered: Subtract the square of the mean.
    """

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LionConfig(OptimizerConfig):
    """Settings of `sbp_torch.optim.Lion`; see `OptimizerConfig`.

    Args:
        betas: Decay of the direction and of the momentum, each in [0, 1).
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LambConfig(OptimizerConfig):
    """Settings of `sbp_torch.optim.Lamb`; see `OptimizerConfig`.

    Args:
        betas: Decay of the mean and of the mean square, each in [0, 1).
        eps: Added to the root of the mean square, > 0.
        adapt: Scale to the norm; usually off in groups of norm weights and biases.
    """

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    adapt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LarsConfig(OptimizerConfig):
    """Settings of `sbp_torch.optim.Lars`; see `OptimizerConfig`.

    Args:
        momentum: Decay of the velocity, in [0, 1).
        trust: Trust coefficient, > 0.
        eps: Added to the divisor, > 0.
        adapt: Scale to the norm; usually off in groups of norm weights and biases.
    """

    lr: float = 1.0
    momentum: float = 0.9
    trust: float = 1e-3
    eps: float = 1e-9
    adapt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AdafactorConfig(OptimizerConfig):
    """Settings of `torch.optim.Adafactor`; see `OptimizerConfig`.

    Args:
        beta2_decay: The weight of new squares is the step number to this power, < 0.
        d: Largest root mean square of an update, > 0.
    """

    lr: float = 1e-2
    beta2_decay: float = -0.8
    d: float = 1.0

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        _check_range("beta2_decay", self.beta2_decay, -1e308, 0.0, "a finite number < 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonConfig(OptimizerConfig):
    """Settings of `torch.optim.Muon`, and of AdamW for the other parameters.

    Muon updates matrices, except those that `adamw` names.

    Args:
        momentum: Momentum of Muon, in [0, 1).
        nesterov: Look ahead.
        ns_steps: Newton-Schulz iterations, 1 to 99.
        adamw: Patterns of names of matrices that AdamW updates, such as embeddings.
        adamw_lr: Learning rate of AdamW, > 0.
        adamw_weight_decay: Weight decay of AdamW, >= 0.
    """

    lr: float = 2e-2
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    adamw: tuple[str, ...] = ("*emb*", "*wte*", "*wpe*", "*head*")
    adamw_lr: float = 1e-3
    adamw_weight_decay: float = 0.0

    OF_OTHERS: ClassVar[tuple[str, ...]] = ("adamw", "adamw_lr", "adamw_weight_decay")

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        _check_range("ns_steps", self.ns_steps, 1, 100, "an integer from 1 to 99")


#: Function that makes an optimizer from parameters with names.
_Make = Callable[[Mapping[str, "torch.nn.Parameter"]], "torch.optim.Optimizer"]


class _Maker:
    """A factory of optimizers that takes parameters, or better pairs of name and parameter."""

    #: Whether the factory uses names; without names, no pattern matches.
    takes_names = True

    def __init__(self, make: _Make) -> None:
        self._make = make

    def __call__(
        self, parameters: Iterable[torch.nn.Parameter | tuple[str, torch.nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """Return an optimizer over the parameters."""
        named = {}
        for index, given in enumerate(parameters):
            name, parameter = given if isinstance(given, tuple) else (f"#{index}", given)
            named[name] = parameter
        return self._make(named)


def optimizer_over(make: OptimizerFactory, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of all parameters of a model, with names if the factory uses them."""
    takes_names = getattr(make, "takes_names", False)
    given: Any = model.named_parameters() if takes_names else model.parameters()
    return make(given)


def _group(named: Mapping[str, torch.nn.Parameter], groups: Groups) -> list[dict[str, Any]]:
    """Return parameter groups: first the parameters that match no pattern, then one per pattern.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    check_patterns("optimizer.groups", groups, list(named), "parameter")
    members: dict[str, list[torch.nn.Parameter]] = {"": [], **{pattern: [] for pattern in groups}}
    for name, parameter in named.items():
        pattern = next((pattern for pattern in groups if fnmatchcase(name, pattern)), "")
        members[pattern].append(parameter)
    return [
        {"params": found, **groups.get(pattern, {})} for pattern, found in members.items() if found
    ]


def _settings(config: OptimizerConfig) -> dict[str, Any]:
    without = {"groups", *config.OF_OTHERS}
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name not in without}


def _builder(module: str, name: str) -> Callable[[OptimizerConfig], OptimizerFactory]:
    """Return a builder of factories for an optimizer class, which is imported on use."""

    def build(config: OptimizerConfig) -> OptimizerFactory:
        def make(named: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
            kind: Callable[..., torch.optim.Optimizer] = getattr(import_module(module), name)
            return kind(_group(named, config.groups), **_settings(config))

        return _Maker(make)

    return build


build_adam = _builder("torch.optim", "Adam")
build_adamw = _builder("torch.optim", "AdamW")
build_sgd = _builder("torch.optim", "SGD")
build_adagrad = _builder("torch.optim", "Adagrad")
build_row_wise_adagrad = _builder("sbp_torch.optim", "RowWiseAdagrad")
build_rmsprop = _builder("torch.optim", "RMSprop")
build_adafactor = _builder("torch.optim", "Adafactor")
build_lion = _builder("sbp_torch.optim", "Lion")
build_lamb = _builder("sbp_torch.optim", "Lamb")
build_lars = _builder("sbp_torch.optim", "Lars")


def build_muon(config: MuonConfig) -> OptimizerFactory:
    """Return a factory of `torch.optim.Muon` for matrices, with AdamW for the rest."""
    import torch

    from sbp_torch.optim import CombinedOptimizer

    def make(named: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        own = [pattern for pattern in config.adamw if pattern not in MuonConfig().adamw]
        check_patterns("optimizer.adamw", own, list(named), "parameter")
        matrices = {
            name: parameter
            for name, parameter in named.items()
            if parameter.dim() == 2 and not any(fnmatchcase(name, p) for p in config.adamw)
        }
        others = {name: p for name, p in named.items() if name not in matrices}
        found: list[torch.optim.Optimizer] = []
        if matrices:
            settings = _settings(config)
            found.append(torch.optim.Muon(_group(matrices, config.groups), **settings))
        elif config.groups:
            raise ConfigError(
                f"optimizer.groups has {', '.join(config.groups)}, and muon moves no parameter",
                todo="leave out optimizer.groups, or take another optimizer",
            )
        if others:
            rate, decay = config.adamw_lr, config.adamw_weight_decay
            found.append(torch.optim.AdamW(list(others.values()), lr=rate, weight_decay=decay))
        return found[0] if len(found) == 1 else CombinedOptimizer(found)

    return _Maker(make)
