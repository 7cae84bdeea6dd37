"""Check the types of the arguments model, loss and optimizer of `parallelize`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import isclass

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from sbp_core.errors import ConfigError, SbpTypeError

_ORDER = "the order is parallelize(model, loss, batch, optimizer)"


def check_model(model: object) -> None:
    """Check that a model is a module for one device.

    Raises:
        ConfigError: it is something else.
        SbpTypeError: it is wrapped in `DataParallel` or `DistributedDataParallel`.
    """
    if isinstance(model, DistributedDataParallel | DataParallel):
        raise SbpTypeError(
            f"model is wrapped: {type(model).__name__}",
            accepted="the model as one device would run it",
            todo="leave the wrapper out, or pass model.module and an optimizer over its parameters",
        )
    if isinstance(model, nn.Module):
        return
    if isclass(model) and issubclass(model, nn.Module):
        todo = f"make a module of the class: {model.__name__}(...)"
    elif isinstance(model, torch.optim.Optimizer) or (callable(model) and not isclass(model)):
        todo = _ORDER
    elif isinstance(model, Mapping | list | tuple | set):
        todo = (
            "put several modules into one: nn.ModuleDict({'actor': actor, 'critic': critic}), "
            "which the loss reads as model['actor']"
        )
    else:
        todo = "pass the module whose parameters are trained"
    raise ConfigError(
        f"model is {_describe(model)}",
        where="the argument model",
        accepted="one torch.nn.Module, or a DeferredModel",
        todo=todo,
    )


def check_loss(loss: object) -> None:
    """Check that a loss is callable.

    Raises:
        ConfigError: it is not.
    """
    if not callable(loss):
        raise ConfigError(
            f"loss is {_describe(loss)}",
            where="the argument loss",
            accepted="a function loss(model, batch) that calls the model and returns its loss",
            todo=f"{_ORDER}; a loss is such as "
            'lambda model, batch: criterion(model(batch["x"]), batch["y"])',
        )


def check_optimizer(optimizer: object) -> None:
    """Check that an optimizer is a `torch.optim.Optimizer`.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return
    if isinstance(optimizer, LRScheduler):
        todo = (
            "pass the optimizer of the scheduler, and call scheduler.step() in the loop: steps "
            "read the learning rates that it sets"
        )
    elif isclass(optimizer) and issubclass(optimizer, torch.optim.Optimizer):
        todo = f"make one of the class: {optimizer.__name__}(model.parameters())"
    elif isinstance(optimizer, nn.Module):
        todo = _ORDER
    elif _has(optimizer, torch.optim.Optimizer):
        todo = (
            "for one step with all of them, combine them: "
            "sbp_torch.optim.CombinedOptimizer([one, other]); for a loss with an optimizer of its "
            "own, plan a second step: step.add_step(loss, batch, other)"
        )
    elif isinstance(optimizer, Iterable):
        todo = "make an optimizer over the parameters: torch.optim.AdamW(model.parameters())"
    else:
        todo = "pass an optimizer of torch.optim or sbp_torch.optim"
    raise ConfigError(
        f"optimizer is {_describe(optimizer)}",
        where="the argument optimizer",
        accepted="one torch.optim.Optimizer over parameters of the model",
        todo=todo,
    )


def _has(given: object, kind: type) -> bool:
    """Whether a collection contains an object of a type; iterators are not consumed."""
    if isinstance(given, Mapping):
        given = given.values()
    elif not isinstance(given, list | tuple | set):
        return False
    return any(isinstance(one, kind) for one in given)


def _describe(value: object) -> str:
    if isclass(value):
        return f"the class {value.__name__}"
    return "None" if value is None else f"of type {type(value).__name__}"
