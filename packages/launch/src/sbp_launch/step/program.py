"""`OneDeviceProgram`: the model, loss and optimizer that a user wrote, to be parallelised."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sbp_core.errors import SbpValueError, unknown_name
from sbp_launch.step.argument_types import check_loss, check_model, check_optimizer
from sbp_torch.deferred_init import DeferredModel
from sbp_torch.graph_capture import VELOCITY, SampleDims, UpdateOptions, initial_states
from sbp_torch.guards import ANEW
from sbp_torch.interchange.torch_states import from_model_state
from sbp_torch.optim import members

#: The ending of the names of step counters.
_COUNTER = ".step"


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDeviceProgram:
    """A program that a user wrote for one device.

    Args:
        model: The model, with values, with deferred values, or without (on the device `meta`).
        loss: A function `loss(model, batch)`, as `capture` takes it.
        optimizer: An optimizer over `model.parameters()`.
        update: Operations that happen once a step in addition to the optimizer.
        deferred: Makes the states of a deferred model.
        samples: The dims of the samples in the batches that `loss` takes.
        anew: Advice, for messages: how to train on after a change that cannot be followed.

    Raises:
        ConfigError: an argument has the wrong type.
        SbpTypeError: the model is wrapped in `DataParallel` or `DistributedDataParallel`.
    """

    model: nn.Module
    loss: Any
    optimizer: torch.optim.Optimizer
    update: UpdateOptions
    deferred: DeferredModel | None = None
    samples: SampleDims = field(default_factory=SampleDims)
    anew: str = ANEW

    def __post_init__(self) -> None:
        check_model(self.model)
        check_loss(self.loss)
        check_optimizer(self.optimizer)

    @classmethod
    def of(
        cls,
        model: nn.Module | DeferredModel,
        loss: Any,
        optimizer: torch.optim.Optimizer,
        update: UpdateOptions,
        samples: SampleDims,
    ) -> OneDeviceProgram:
        """Return the program of the arguments that a user passes."""
        made = model if isinstance(model, DeferredModel) else None
        plain = model.model if isinstance(model, DeferredModel) else model
        return cls(
            model=plain,
            loss=loss,
            optimizer=optimizer,
            update=update,
            deferred=made,
            samples=samples,
        )

    @property
    def loss_of_step(self) -> Any:
        """The loss function for batches as steps have them, with samples along dim 0."""
        return self.samples.loss(self.loss)

    def own_states(self) -> Mapping[str, Tensor]:
        """Return every state by its name in the graph, with the values of the program."""
        if self.deferred is not None:
            return self.deferred.states(self.optimizer, self.update)
        return initial_states(self.model, self.optimizer, self.update, copy=False)

    @property
    def trained(self) -> set[str]:
        """The names of the parameters that the optimizer has."""
        held = {
            id(parameter)
            for one in members(self.optimizer)
            for group in one.param_groups
            for parameter in group["params"]
        }
        return {name for name, one in self.model.named_parameters() if id(one) in held}

    def counts_alike(self, given: Mapping[str, Tensor] | None) -> bool:
        """Whether the optimizer has taken the same number of steps with all its parameters.

        The numbers differ after a layer was frozen for a while, or was added.

        Args:
            given: Values of states that replace those of the program.
        """
        if given and any(name.endswith(_COUNTER) for name in given):
            counts = {float(value) for name, value in given.items() if name.endswith(_COUNTER)}
            return len(counts) == 1
        trained = [
            (one, parameter)
            for one in members(self.optimizer)
            for group in one.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        held = [one.state.get(parameter, {}).get("step", 0.0) for one, parameter in trained]
        return len({float(value) for value in held}) <= 1

    def first_states(self, given: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """Return every state by its name in the graph.

        Args:
            given: Values of states that replace those of the program, as returned by
                `state_dict()` of a parallel step or by `model.state_dict()`.

        Raises:
            SbpLookupError: a value is given for a name that no state has.
            SbpValueError: a state has no values.
        """
        found = self.own_states()
        if given is None and self.deferred is not None:
            return found
        given = given or {}
        own = self.model.state_dict(keep_vars=True)
        if given and all(name in own for name in given) and len(given) == len(own):
            given = from_model_state(given, self.model)
        for name in given:
            if name not in found:
                raise unknown_name("state", name, found)
        if len(given) == len(found):
            return given
        return {
            name: value if name in given else self._with_values(name, value, given)
            for name, value in {**found, **given}.items()
        }

    def _with_values(self, name: str, value: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        """Return a state that is not in `given`, if it has values.

        A copy of a parameter, such as an average, takes the given values of the parameter.
        """
        if not value.is_meta:
            return value
        parameter = name.rpartition(".")[0]
        if parameter in given and given[parameter].shape == value.shape:
            return given[parameter].to(value.dtype)
        raise SbpValueError(
            f"{name!r} has no values: the model is on the device 'meta'",
            accepted="a model with values; or states for all its parameters and buffers",
            todo="make it by sbp_torch.deferred(build, seed), which makes each rank "
            "its own part; or pass states=..., such as safetensors.torch.load_file(path)",
        )


@contextmanager
def as_stepped(program: OneDeviceProgram, updated: Collection[str]) -> Iterator[None]:
    """Give SGD placeholders, inside the block, for momenta whose values are on the ranks.

    SGD sets the first momentum of a parameter to the gradient, so it checks whether there is one.

    Args:
        program: The program that has the optimizer.
        updated: Names of states that have values.
    """
    made = []
    for one in members(program.optimizer):
        for name, parameter in program.model.named_parameters():
            has_one = f"{name}.{VELOCITY}" in updated and isinstance(one, torch.optim.SGD)
            if has_one and parameter not in one.state:
                momentum = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                one.state[parameter] = {VELOCITY: momentum}
                made.append((one.state, parameter))
    try:
        yield
    finally:
        for state, parameter in made:
            del state[parameter]


@contextmanager
def without_states(program: OneDeviceProgram, parameters: Collection[str]) -> Iterator[None]:
    """Hide, inside the block, the optimizer states of some parameters from the optimizer."""
    named = dict(program.model.named_parameters())
    held = [
        (one.state, named[name], one.state.pop(named[name]))
        for one in members(program.optimizer)
        for name in parameters
        if named[name] in one.state
    ]
    try:
        yield
    finally:
        for state, parameter, value in held:
            state[parameter] = value
