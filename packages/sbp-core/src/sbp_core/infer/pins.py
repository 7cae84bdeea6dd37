"""Resolve pins: shardings fixed by the user or a planner, to an entry for each tensor and axis.

A pin is a pattern and a value; later pins override earlier ones, mesh axis by mesh axis. What
patterns and values mean is explained in `docs/how-to/pins.md`, with examples. In short:

* `batch`, `parameters`, `optimizer_states`: all graph inputs of that kind;
* `activations`: every floating forward value whose dim 0 is the sample (it depends on a batch
  input and has the extent of the batch's dim 0);
* `gradients`: the values that the backward pass hands to the optimizer;
* `micro_gradients`: the gradients of each micro-batch, before they are accumulated; without
  micro-batches there are none;
* `updates`: the values that the optimizer makes;
* an `fnmatch` pattern of names, tried in this order: graph inputs; module paths, which means the
  values that leave the module in its forward pass; values.

A value is `"S(0)"` (on every mesh axis), `"S(0), B"` (one entry for each axis), or
`{axis: "S(0)"}`, which leaves other axes open; the axis `*` means every axis not named. `S(-1)`
splits the last dim of any tensor; `free` removes earlier pins.

Pinning an input decides how it is *stored*. Pinning a value, or an input with `use:` before the
pattern, decides how it is *used*. It is boxed to that SBP once, from whatever SBP it is made or
stored in, and every op that uses it, directly or through a view, takes it in that SBP.

The words (`batch`, `gradients`, ...) are ignored for a tensor that cannot have the SBP (a state
without dims, an op that cannot take a split sample), unless no tensor with dims that the word means
can have it. Any other pin that cannot be met is an error. Decides nothing that is not pinned.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeGuard

from sbp_core.errors import ConfigError, SbpError, SbpValueError, suggestion
from sbp_core.graph.ir import InputKind, LogicalGraph, Phase, TensorType
from sbp_core.graph.primitives import ACCUMULATE, PIECE
from sbp_core.sbp import Partial, Sbp, Split, parse_sbp

#: The value of a pin: an SBP, or an SBP for each mesh axis by name.
PinValue = str | Mapping[str, str]

#: Words that stand for all graph inputs of a kind.
INPUT_WORDS = {
    "batch": InputKind.BATCH,
    "parameters": InputKind.PARAMETER,
    "optimizer_states": InputKind.OPTIMIZER_STATE,
}
#: Words that stand for values of a kind.
VALUE_WORDS = ("activations", "micro_gradients", "gradients", "updates")
OTHER_AXES = "*"

#: The mesh axis whose positions are pipeline stages; nothing is split over it.
PIPE_AXIS = "pipe"

#: The place that errors name for a pin; planners replace it by their setting.
PINS = "pins"

#: The prefix of a pattern of inputs that decides how they are used, not how they are stored.
USE = "use:"

#: The number of a layer in a name.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

_FROM_BACK = re.compile(r"S\(\s*-\s*(\d+)\s*\)")


@dataclass(frozen=True, slots=True)
class _SplitFromBack:
    """A split of a dim counted from the last, 1 being the last."""

    from_back: int

    def __repr__(self) -> str:
        return f"S(-{self.from_back})"


@dataclass(frozen=True, slots=True)
class _Free:
    """No pin."""

    def __repr__(self) -> str:
        return "free"


_Entry = Sbp | _SplitFromBack | _Free


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One decided entry.

    Args:
        entry: The SBP on that axis.
        text: The pin as written, for messages.
        firm: Whether it must hold; otherwise it is ignored where it cannot hold.
    """

    entry: Sbp
    text: str
    firm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """All pins of a graph: (name, mesh axis) -> pin, of stored inputs and of used values."""

    storage: Mapping[tuple[str, int], Pin]
    use: Mapping[tuple[str, int], Pin]


def is_pin_word(pattern: str) -> bool:
    """Return whether a pattern is a word for many tensors: `batch`, `use:batch`, `gradients`."""
    bare = pattern.removeprefix(USE)
    return bare in INPUT_WORDS or bare in VALUE_WORDS


def resolve_pins(graph: LogicalGraph, axes: Sequence[str], *layers: Mapping[str, PinValue]) -> Pins:
    """Resolve pins; later layers override earlier ones.

    Args:
        graph: The graph that has the names.
        axes: Names of the mesh axes of a stage.
        layers: Pins in the order in which they apply.

    Raises:
        ConfigError: a pin matches nothing, names an axis that the mesh does not have, cannot be
            parsed, or cannot hold for a tensor that it matches.
    """
    storage: dict[tuple[str, int], Pin] = {}
    use: dict[tuple[str, int], Pin] = {}
    names = _Names(graph)
    for layer in layers:
        for pattern, value in layer.items():
            text = f"{pattern}: {_text(value)}"
            entries = _entries(value, axes, text)
            # Words mean many tensors at once; the ones that cannot hold the pin are skipped. A user
            # who names a tensor or a module means exactly that.
            bare, firm = pattern.removeprefix(USE), not is_pin_word(pattern)
            matched = names.match(bare, text)
            if not firm:
                _check_some_hold(graph, matched, entries, bare, text)
            for name in matched:
                stored = name in names.inputs and bare == pattern
                shape = graph.tensor(name).shape
                for axis, written in entries.items():
                    # Removes earlier pins; a later pin may apply again.
                    if isinstance(written, _Free):
                        (storage if stored else use).pop((name, axis), None)
                        continue
                    entry = _entry_of(written, len(shape))
                    if _can_hold(entry, len(shape), stored):
                        pin = Pin(entry=entry, text=text, firm=firm)
                        (storage if stored else use)[name, axis] = pin
                    # Storing `P` is refused for words, too: no tensor of the word could do it.
                    elif firm or isinstance(entry, Partial):
                        raise _cannot_hold(text, name, shape, stored)
    return Pins(storage=storage, use=use)


def _check_some_hold(
    graph: LogicalGraph, names: Sequence[str], entries: Mapping[int, _Entry], word: str, text: str
) -> None:
    """Check that a word splits a dim that one of its tensors has, if any of them has dims.

    Raises:
        ConfigError: the pin would apply to no tensor.
    """
    dims = {len(graph.tensor(name).shape) for name in names} - {0}
    for written in entries.values():
        if isinstance(written, _Free) or not dims:
            continue
        most = max(dims)
        entry = _entry_of(written, most)
        if entry is None or (isinstance(entry, Split) and entry.dim >= most):
            counts = ", ".join(map(str, sorted(dims)))
            raise ConfigError(
                f"the pin '{text}' holds for no tensor of {word!r}: they have {counts} dims",
                where=PINS,
                accepted=", ".join(["B", *(f"S({dim})" for dim in range(most))]),
                todo="pin a dim that the tensors have; the first dim is S(0)",
            )


def _text(value: PinValue) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"a pin has the value {value!r}",
            where=PINS,
            accepted="'S(0)', 'S(0), B' with one entry for each mesh axis, or {axis: 'S(0)'}",
        )
    return "{" + ", ".join(f"{axis}: {entry}" for axis, entry in value.items()) + "}"


def check_pin(pattern: str, value: PinValue, axes: Sequence[str] | None = None) -> None:
    """Check that a pin can be parsed, for any graph.

    Args:
        pattern: Its pattern.
        value: Its value.
        axes: Names of the mesh axes of a stage; None if they are not known.

    Raises:
        ConfigError: it cannot be parsed, or names another mesh axis.
    """
    text = f"{pattern}: {_text(value)}"
    if axes is None:
        _read(value, text)
    else:
        _entries(value, axes, text)


def _read(value: PinValue, text: str) -> list[_Entry] | dict[str, _Entry]:
    """Return the entries of all axes in order, one for all of them, or those by axis."""
    try:
        if isinstance(value, str):
            return [_parse_entry(part) for part in value.strip().strip("[]").split(",")]
        entries = {axis: _parse_entry(entry) for axis, entry in value.items()}
    except SbpError as error:
        raise ConfigError(
            f"the pin '{text}' cannot be read: {error.what}",
            where=PINS,
            accepted=f"{error.accepted}; S(-1) for the last dim; free",
        ) from error
    if not entries:
        raise ConfigError(
            f"the pin '{text}' names no mesh axis", where=PINS, accepted="{axis: 'S(0)'}, or 'S(0)'"
        )
    return entries


def _entries(value: PinValue, axes: Sequence[str], text: str) -> dict[int, _Entry]:
    """Return the pinned entry of each mesh axis that the pin decides."""
    parts = _read(value, text)
    if isinstance(parts, list):
        if len(parts) == 1:
            parts = parts * len(axes)
        if len(parts) != len(axes):
            raise ConfigError(
                f"the pin '{text}' has {len(parts)} entries for a mesh of {len(axes)} axes",
                where=PINS,
                accepted=f"one entry for all axes, or one for each of {', '.join(axes)}",
            )
        return dict(enumerate(parts))
    found = {
        axes.index(_known_axis(name, axes, text)): entry
        for name, entry in parts.items()
        if name != OTHER_AXES
    }
    if OTHER_AXES in parts:
        found = {axis: found.get(axis, parts[OTHER_AXES]) for axis in range(len(axes))}
    return found


def _known_axis(name: str, axes: Sequence[str], text: str) -> str:
    if name in axes:
        return name
    if name == PIPE_AXIS:
        raise ConfigError(
            f"the pin '{text}' names the mesh axis {name!r}, but its positions are pipeline stages",
            where=PINS,
            accepted=f"{', '.join(axes)}, or {OTHER_AXES!r} for all of these",
            todo="say with planner.stage_patterns which modules a stage has",
        )
    # A key of YAML or of a command line may have been cut at its dots, or after `use`.
    pattern = text.partition(": ")[0]
    whole = f"{pattern}{':' if f'{pattern}:' == USE else '.'}{name}"
    raise ConfigError(
        f"the pin '{text}' names the mesh axis {name!r}, which this mesh does not have",
        where=PINS,
        accepted=f"{', '.join(axes)}, or {OTHER_AXES!r} for every axis not named",
        todo=suggestion(
            name,
            axes,
            "give the mesh that axis (cluster.mesh), or pin an axis that it has; "
            f"a name with a dot or colon is one key: pins={{'{whole}': ...}}",
        ),
    )


def _parse_entry(text: object) -> _Entry:
    if not isinstance(text, str):
        raise SbpValueError(f"{text!r} is no SBP value", accepted="S(dim), B, P, free")
    if text.strip() == "free":
        return _Free()
    found = _FROM_BACK.fullmatch(text.strip())
    if found and int(found[1]) > 0:
        return _SplitFromBack(int(found[1]))
    return parse_sbp(text)


def _entry_of(written: Sbp | _SplitFromBack, num_dims: int) -> Sbp | None:
    """Return the SBP of an entry for a tensor; None if it counts back beyond the first dim."""
    if not isinstance(written, _SplitFromBack):
        return written
    dim = num_dims - written.from_back
    return Split(dim) if dim >= 0 else None


def _can_hold(entry: Sbp | None, num_dims: int, stored: bool) -> TypeGuard[Sbp]:
    if isinstance(entry, Split):
        return entry.dim < num_dims
    return entry is not None and not (stored and isinstance(entry, Partial))


def _cannot_hold(text: str, name: str, shape: tuple[int, ...], stored: bool) -> ConfigError:
    splits = [f"S({dim})" for dim in range(len(shape))]
    return ConfigError(
        f"the pin '{text}' cannot hold for {name!r} of shape {shape}",
        where=PINS,
        accepted=", ".join(["B", *splits, *([] if stored else ["P"])]),
        todo="pin a dim that the tensor has; nothing is stored as P",
    )


#: Characters that make a name a pattern of `fnmatch`.
_WILDCARDS = frozenset("*?[")


class _Names:
    """The names of one graph that patterns can match."""

    def __init__(self, graph: LogicalGraph) -> None:
        self.graph = graph
        self.inputs = {
            entry.name: entry.kind for entry in graph.inputs if graph.is_tensor(entry.name)
        }
        self.modules = _modules(graph)
        self.values = dict.fromkeys(
            value for node in graph.nodes for value in node.outputs if graph.is_tensor(value)
        )

    def match(self, pattern: str, text: str) -> list[str]:
        """Return the inputs or the values that a pattern matches."""
        if pattern in INPUT_WORDS:
            kind = INPUT_WORDS[pattern]
            return [name for name, found in self.inputs.items() if found is kind]
        if pattern in VALUE_WORDS:
            return _VALUES[pattern](self.graph)
        # The first kind of name with a match counts: `blocks.0.*` means the parameters of the
        # module, if it has some, and not also the values inside it.
        inputs = _matching(self.inputs, pattern)
        if inputs:
            return inputs
        modules = _matching(self.modules, pattern)
        # A module is no tensor: the pin applies to its outputs.
        values = [value for module in modules for value in module_outputs(self.graph, module)]
        values = values or _matching(self.values, pattern)
        if not values:
            raise self._unmatched(pattern, text)
        return list(dict.fromkeys(values))

    def _unmatched(self, pattern: str, text: str) -> ConfigError:
        known = [*INPUT_WORDS, *VALUE_WORDS, *self.inputs, *self.modules, *self.values]
        if "*" in pattern:
            # The pin names all layers, so the suggestion does, too.
            known = list(dict.fromkeys(_NUMBER.sub("*", name) for name in known))
        near = difflib.get_close_matches(pattern.strip("*."), known, n=4, cutoff=0.3)
        return ConfigError(
            f"the pin '{text}' matches no tensor and no module of {self.graph.name!r}",
            where=PINS,
            accepted="a pattern of parameters, states, batch inputs, modules or values; "
            + ", ".join([*INPUT_WORDS, *VALUE_WORDS]),
            todo=f"the nearest names are {', '.join(near)}" if near else "list the graph's names",
        )


def _matching(names: Mapping[str, object], pattern: str) -> list[str]:
    # Inferred pins name every tensor separately: searching all names for each takes minutes.
    if not _WILDCARDS.intersection(pattern):
        return [pattern] if pattern in names else []
    return [name for name in names if fnmatchcase(name, pattern)]


def _modules(graph: LogicalGraph) -> dict[str, None]:
    """Return the paths of all modules with forward nodes, and of the modules around them."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        if node.phase is Phase.FORWARD and node.module:
            parts = node.module.split(".")
            found.update(dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts))))
    return found


def is_within(module: str, outer: str) -> bool:
    """Return whether a module path is `outer` or is within it."""
    return module == outer or module.startswith(outer + ".")


def module_outputs(graph: LogicalGraph, module: str) -> list[str]:
    """Return the tensors made by a module's forward nodes that are used outside it."""
    results = {out.value for out in graph.outputs}
    return [
        value
        for node in graph.nodes
        if node.phase is Phase.FORWARD and is_within(node.module, module)
        for value in node.outputs
        if graph.is_tensor(value)
        and (
            value in results
            or any(not is_within(user.module, module) for user in graph.users[value])
        )
    ]


def activations(graph: LogicalGraph) -> list[str]:
    """Return the floating forward values whose dim 0 is the sample."""
    batch = [entry.name for entry in graph.inputs if entry.kind is InputKind.BATCH]
    extents = {graph.tensor(name).shape[0] for name in batch if _rank(graph, name)}
    dependent = set(batch)
    found: list[str] = []
    for node in graph.nodes:
        # The second input of `sbp.piece` only orders it: the result does not depend on it.
        read = node.inputs()[:1] if node.op == PIECE else node.inputs()
        if node.phase is not Phase.FORWARD or not dependent.intersection(read):
            continue
        dependent.update(node.outputs)
        for value in node.outputs:
            kind = graph.types[value]
            if (
                isinstance(kind, TensorType)
                and kind.dtype.startswith(("float", "bfloat"))
                and len(kind.shape) > 1
                and kind.shape[0] in extents
            ):
                found.append(value)
    return found


def _rank(graph: LogicalGraph, name: str) -> int:
    kind = graph.types[name]
    return len(kind.shape) if isinstance(kind, TensorType) else 0


def gradients(graph: LogicalGraph) -> list[str]:
    """Return the tensors that nodes outside the optimizer make and optimizer nodes use."""
    return [
        value
        for node in graph.nodes
        if node.phase is not Phase.OPTIMIZER
        for value in node.outputs
        if graph.is_tensor(value)
        and any(user.phase is Phase.OPTIMIZER for user in graph.users[value])
    ]


def micro_gradients(graph: LogicalGraph) -> list[str]:
    """Return the tensors that are accumulated over micro-batches to the `gradients`."""
    makers = (graph.producers[value] for value in gradients(graph))
    return [
        value for node in makers if node.op == ACCUMULATE for value in graph.tensor_inputs(node)
    ]


def updates(graph: LogicalGraph) -> list[str]:
    """Return the tensors that optimizer nodes make."""
    return [
        value
        for node in graph.nodes
        if node.phase is Phase.OPTIMIZER
        for value in node.outputs
        if graph.is_tensor(value)
    ]


_VALUES: Mapping[str, Callable[[LogicalGraph], list[str]]] = {
    "activations": activations,
    "gradients": gradients,
    "micro_gradients": micro_gradients,
    "updates": updates,
}
