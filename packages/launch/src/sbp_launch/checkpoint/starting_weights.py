"""Start training from weights in a file or folder (`trainer.init_from`), and check them.

    file: wte.weight   -->   states: network.wte.weight            read in parts
                                     network.wte.weight.exp_avg    as before the first step

Parameters and buffers are read; each process reads only the parts of its ranks. States that start
as a copy of a parameter, such as its moving average, start as a copy of the weights from the file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from sbp_core.errors import ConfigError, nearest
from sbp_launch.checkpoint.cover import index_of
from sbp_launch.checkpoint.names import match_names, model_names, without_wrappers
from sbp_launch.checkpoint.places import FoundTensors, look, open_tensors
from sbp_launch.checkpoint.tensors import LazyTensors
from sbp_torch.graph_capture import UpdateOptions, copied_states
from sbp_torch.interchange.torch_states import graph_names, stored_names


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """The source of one state.

    Args:
        names: Its names in the file; several names are one tied tensor.
        shape, dtype: Shape and dtype in the model.
    """

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingWeights:
    """Weights that fit a model.

    Args:
        found: The place of the weights.
        sources: The states to read, by their names in the graph.
    """

    found: FoundTensors
    sources: Mapping[str, WeightSource]

    @contextmanager
    def over(self, states: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        """Open the weights; yield the states, with the weights in place of the initial values."""
        with open_tensors(self.found) as tensors:
            yield _States(states, tensors, self.sources)


def find_weights(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    update: UpdateOptions,
    *,
    where: str,
) -> StartingWeights:
    """Match the weights in a file or folder to the states of a model, by name.

    The names may differ by one prefix, such as `network.` or `model.`: the prefix with which most
    names fit is used. Parts that wrappers add, such as `_orig_mod.` of `torch.compile`, are
    ignored anywhere in a name.

    Args:
        path: A checkpoint, or any place that `sbp_launch.checkpoint.places.look` accepts.
        model: The one-device program; its values may be deferred.
        optimizer: The optimizer of its parameters.
        update: The options of the update, as for `capture`.
        where: The setting that names the path, for messages.

    Raises:
        ConfigError: there are no weights, a name is missing or unknown, or a shape differs.
        SbpValueError: a hook makes tensors of `model.state_dict()`, which the model has not.
    """
    found = look(path)
    with open_tensors(found) as tensors:
        # Checkpoints of ours also have tensors that a state_dict() leaves out.
        possible = graph_names(model)
        renamed = _match_names(model_names(tensors), possible)
        place = (found.place, where)
        # Counters that are optional in PyTorch, as older weights lack them.
        counters = {
            f"{path}.num_batches_tracked".removeprefix(".")
            for path, module in model.named_modules()
            if isinstance(module, nn.modules.batchnorm._NormBase)
        }
        lacking = {*stored_names(model).values()} - counters
        lacking -= {possible[name] for name in renamed if name in possible}
        missing = [name for name, state in possible.items() if state in lacking]
        unknown = [name for name in renamed if name not in possible]
        if unknown or missing:
            raise _name_error(unknown, missing, renamed, possible, place)
        sources: dict[str, WeightSource] = {}
        for name, source in renamed.items():
            state = possible[name]
            before = sources[state].names if state in sources else ()
            home, _, key = state.rpartition(".")
            value: Tensor = getattr(model.get_submodule(home), key)
            _check_form(source, tensors, value, place)
            sources[state] = WeightSource(
                names=(*before, source), shape=value.shape, dtype=value.dtype
            )
    for state, (parameter, dtype) in copied_states(model, optimizer, update).items():
        sources[state] = replace(sources[parameter], dtype=dtype)
    return StartingWeights(found=found, sources=sources)


def named_as_in(states: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
    """Return states by the names of a model, in which other modules may be wrapped."""
    own = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    if all(name in states for name in own):
        return states  # a lazy mapping stays lazy
    return {here: states[there] for here, there in match_names(states, own).items()}


def _match_names(given: Sequence[str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Map the model's names to the given names; unknown names keep theirs.

    >>> _match_names(["h.w", "h.b"], {"network.h.w": "", "network.h.b": "", "network.x": ""})
    {'network.h.w': 'h.w', 'network.h.b': 'h.b'}
    >>> _match_names(["h._orig_mod.w"], {"h.w": ""})
    {'h.w': 'h._orig_mod.w'}
    """
    own = {plain: name for name, plain in without_wrappers(wanted).items()}
    names = {plain: name for name, plain in without_wrappers(given).items()}
    beginnings = {("", "")}
    for name in [*names][:8]:
        beginnings |= {("", one.removesuffix(name)) for one in own if one.endswith(f".{name}")}
        beginnings |= {(name.removesuffix(one), "") for one in own if name.endswith(f".{one}")}

    def fit(pair: tuple[str, str]) -> tuple[int, int]:
        fitting = sum(pair[1] + name.removeprefix(pair[0]) in own for name in names)
        return fitting, -len("".join(pair))

    old, new = max(sorted(beginnings), key=fit)
    found = {new + plain.removeprefix(old): name for plain, name in names.items()}
    return {own.get(plain, plain): name for plain, name in found.items()}


def _name_error(
    unknown: Sequence[str],
    missing: Sequence[str],
    renamed: Mapping[str, str],
    possible: Mapping[str, str],
    place: tuple[str, ...],
) -> ConfigError:
    """Return the error for unknown or else missing names; it suggests the most similar name."""
    if unknown:
        near = nearest(unknown[0], missing or possible)
        more = f" (nor {len(unknown) - 1:,} more)" if len(unknown) > 1 else ""
        return ConfigError(
            f"the model has nothing called {renamed[unknown[0]]!r}{more}",
            where=place,
            accepted=f"its own names, such as {', '.join(list(possible)[:4])}",
            todo=f"did you mean {near!r}?"
            if near
            else "sbp-checkpoint convert renames tensors (--rename) or leaves them out (--drop)",
        )
    near = nearest(missing[0], renamed)
    more = f" (nor {len(missing) - 1:,} more)" if len(missing) > 1 else ""
    return ConfigError(
        f"there is no {missing[0]!r}{more}, which the model has",
        where=place,
        accepted="all parameters and buffers of the model",
        todo=f"is it {near!r}?" if near else "use weights of exactly this model",
    )


def _check_form(name: str, tensors: LazyTensors, own: Tensor, place: tuple[str, ...]) -> None:
    """Check that a tensor can be loaded into one of the model's, by the rules of PyTorch.

    Raises:
        ConfigError: its shape differs, or the dtype of the model cannot hold its values.
    """
    given = tensors.like(name)
    if given.shape != own.shape and (own.dim(), given.shape) != (0, (1,)):
        raise ConfigError(
            f"{name!r} has shape {tuple(given.shape)}",
            where=place,
            accepted=f"{tuple(own.shape)}, as in the model",
        )
    if given.dtype == own.dtype or (given.is_floating_point() and own.is_floating_point()):
        return
    # Counters and indices of another width: small tensors, so their values can be compared.
    whole = not (own.is_floating_point() or own.is_complex() or given.is_complex())
    if not (whole and torch.equal(value := tensors[name], value.to(own.dtype).to(given.dtype))):
        raise ConfigError(
            f"{name!r} is of {given.dtype}",
            where=place,
            accepted=f"{own.dtype}, as in the model"
            + (", or values that this dtype represents exactly" if whole else ""),
        )


class _States(LazyTensors):
    """States of which some are read from a file, in parts.

    Args:
        states: The initial states.
        tensors: The tensors of the file.
        sources: The states to read, with their sources.
    """

    def __init__(
        self,
        states: Mapping[str, Tensor],
        tensors: LazyTensors,
        sources: Mapping[str, WeightSource],
    ) -> None:
        self._states, self._tensors, self._sources = states, tensors, sources
        #: The state made last: its shape is asked for before its parts.
        self._made: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._sources:
            return self._state(name)
        return super().__getitem__(name)

    @property
    def names(self) -> Collection[str]:
        """The names of the states."""
        return self._states.keys()

    def like(self, name: str) -> Tensor:
        """See `LazyTensors.like`."""
        if name not in self._sources:
            return self._state(name).to("meta")
        source = self._sources[name]
        return torch.empty(source.shape, dtype=source.dtype, device="meta")

    def part(self, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """Return a new tensor with a part of a state: (start, stop) of each dim.

        Raises:
            ConfigError: tied tensors differ.
        """
        if name not in self._sources:
            return self._state(name)[index_of(bounds)].clone()
        source = self._sources[name]
        first = source.names[0]
        found = self._part(first, bounds)
        for other in source.names[1:]:
            if not torch.equal(found, self._part(other, bounds)):
                raise ConfigError(
                    f"{first!r} and {other!r} are one tensor in the model, and differ",
                    todo="untie them in the model, or leave one out: sbp-checkpoint convert --drop",
                )
        return found.to(source.dtype)

    def _part(self, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        # A state without dims may have shape (1,) in the file.
        return self._tensors.part(name, bounds) if bounds else self._tensors[name].reshape(())

    def _state(self, name: str) -> Tensor:
        if self._made is None or self._made[0] != name:
            self._made = None  # free the last state before the next is made
            self._made = (name, self._states[name])
        return self._made[1]
