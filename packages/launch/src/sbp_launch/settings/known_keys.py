"""The keys of all settings, and which of them an unknown key may mean.

A key is looked for in all groups, by its last name: `steps` may mean `trainer.steps`. What settings
callbacks take is read from their dataclasses, because no option file tells of them.
"""

from __future__ import annotations

import difflib
import inspect
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Union, get_args, get_origin

from sbp_core.plugins import PluginEntry, PluginRegistry, describe_type, type_hints
from sbp_launch.compile_config import CompileConfig
from sbp_launch.settings.config import PLUGIN_GROUPS, ComposedConfig, TrainerConfig

#: What other trainers call our settings.
_CALLED = {
    "cluster.mesh": "devices nproc_per_node",
    "compile.autocast": "mixed_precision precision",
    "data.path": "data_path",
    "model.context": "seq_len",
    "model.num_layers": "n_layer",
    "optimizer.lr": "learning_rate",
    "trainer.batch_size": "batch global_batch_size local_batch_size",
    "trainer.epochs": "max_epochs num_epochs num_train_epochs",
    "trainer.evaluate.batches": "eval_batches limit_val_batches",
    "trainer.evaluate.every": "eval_every eval_steps val_check_interval",
    "trainer.hours": "max_time",
    "trainer.micro_batches": "accumulate_grad_batches gradient_accumulation_steps",
    "trainer.schedule.warmup_steps": "warmup",
    "trainer.steps": "max_steps num_steps",
    "trainer.update.clip_norm": "grad_clip gradient_clip_val gradient_clipping max_grad_norm "
    "max_norm",
}

#: Our key of each of these names, in the order of the names.
OTHER_NAMES: Mapping[str, str] = dict(
    sorted((name, ours) for ours, names in _CALLED.items() for name in names.split())
)

#: How much alike a slip of the pen and what was meant are, at least.
_ALIKE = 0.6

#: The same for a last name alone, which is shorter.
_ALIKE_NAMES = 0.75

#: The same for a last name that other trainers have, which goes before a name of ours.
_ALIKE_OTHERS = 0.85

#: Most keys that a hint names.
_MOST_HINTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting that some option takes.

    Args:
        key: `planner.memory_bytes`.
        options: The options that take it, such as `planner=osdp`; empty if the chosen one does.
    """

    key: str
    options: tuple[str, ...] = ()

    @property
    def leaf(self) -> str:
        """Its last name."""
        return self.key.rpartition(".")[2]


def known_settings(composed: ComposedConfig, registry: PluginRegistry) -> tuple[Setting, ...]:
    """Return the settings of the groups that a config has, those of the chosen options first."""
    chosen: dict[str, None] = {}
    others: dict[str, list[str]] = {}
    for group, config in (("trainer", TrainerConfig), ("compile", CompileConfig)):
        if group in composed.values:
            chosen |= dict.fromkeys(keys_of(config, group))
    for entry in registry.entries:
        if entry.kind not in PLUGIN_GROUPS or entry.kind not in composed.values:
            continue
        assert entry.factory is not None, "an entry of a kind has a factory"
        value = composed.values[entry.kind]
        is_chosen = isinstance(value, Mapping) and value.get("name") == entry.name
        for key in keys_of(entry.factory.config, entry.kind):
            if is_chosen:
                chosen[key] = None
            else:
                others.setdefault(key, []).append(f"{entry.kind}={entry.name}")
    rest = [Setting(key=key, options=tuple(by)) for key, by in others.items() if key not in chosen]
    return (*(Setting(key=key) for key in chosen), *rest)


def keys_of(config: type, prefix: str) -> Iterator[str]:
    """Yield the keys of a config dataclass, and of those that it holds."""
    assert is_dataclass(config), f"{config!r} is no dataclass"
    for name, nested in nested_configs(config).items():
        yield f"{prefix}.{name}"
        if nested is not None:
            yield from keys_of(nested, f"{prefix}.{name}")


def nested_configs(config: type) -> dict[str, type | None]:
    """Return the names of a config dataclass, each with the dataclass of its value, or None."""
    assert is_dataclass(config), f"{config!r} is no dataclass"
    hints = type_hints(config)
    return {field.name: _dataclass_of(hints.get(field.name)) for field in fields(config)}


def takes_of(config: type) -> dict[str, str]:
    """Return what values each setting of a config dataclass takes, in words."""
    assert is_dataclass(config), f"{config!r} is no dataclass"
    hints = type_hints(config)
    return {field.name: describe_type(hints[field.name]) for field in fields(config)}


def _dataclass_of(hint: object) -> type | None:
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((one for one in parts if isinstance(one, type) and is_dataclass(one)), None)


def ours_of(name: str, names: Iterable[str] = ()) -> str:
    """Return our key of what other trainers call so, or nearly so; `""` if none does.

    Args:
        name: What somebody wrote.
        names: Last names of ours; one that is nearer is what was meant.

    >>> ours_of("gradient_cliping")
    'trainer.update.clip_norm'
    """
    near = difflib.get_close_matches(name, [*names, *OTHER_NAMES], n=1, cutoff=_ALIKE_OTHERS)
    return OTHER_NAMES.get(near[0], "") if near else ""


def meant(key: str, settings: Iterable[Setting], value: str = "") -> str:
    """Return what an unknown key may mean, as a hint to the user, or `""`.

    The last name decides: the same name in other groups, what other trainers call so, a like one.

    Args:
        key: Such as `steps`, `trainer.lr` or `trianer.steps`.
        settings: Those that there are.
        value: What it was to be.
    """
    every = list(settings)
    leaf = key.rpartition(".")[2]
    found = [one for one in every if one.leaf == leaf]
    if not found and (ours := ours_of(leaf, [one.leaf for one in every])):
        found = [one for one in every if one.key == ours]
    if not found:
        near = difflib.get_close_matches(key, [one.key for one in every], n=1, cutoff=_ALIKE)
        names = {one.leaf for one in every}
        near_leaf = difflib.get_close_matches(leaf, sorted(names), n=1, cutoff=_ALIKE_NAMES)
        near_leaf = near_leaf or [one for one in names if one.startswith(f"{leaf}_")]
        found = [one for one in every if one.key in near] if "." in key else []
        found = found or [one for one in every if one.leaf in near_leaf]
    if found and all(one.options and one.key == key for one in found):
        takes = "takes" if len(found[0].options) == 1 else "take"
        return f"{', '.join(found[0].options)} {takes} {key}"
    best = sorted(found, key=lambda one: (one.key.count("."), len(one.options)))[:_MOST_HINTS]
    hints = []
    for one in best:
        named = f"{one.key}={value}" if value else f"'{one.key}'"
        hints.append(f"{named} of {' or '.join(one.options)}" if one.options else named)
    return f"did you mean {', or '.join(hints)}?" if best else ""


#: Where `Args:` of a docstring begins a setting: `patience: Evaluations without ...`.
_ARGUMENT = re.compile(r" {4}(?P<name>\w+): (?P<meaning>.*)")


def callbacks_of(registry: PluginRegistry) -> list[PluginEntry]:
    """Return the callbacks that there are, by name."""
    return [one for one in registry.entries if one.kind == "callback" and one.factory is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """One setting as it is told of: what its file or docstring says, and what values it takes.

    Args:
        key: Of the setting; of a callback the name of the field.
        value: That it has; `...` if it has to be given, `{}` of a heading.
        comment: What is said of it, or `""`.
        takes: What values it takes, in words.
        is_heading: Whether its settings have rows of their own, below.
    """

    key: str
    value: object
    comment: str
    takes: str = ""
    is_heading: bool = False


def setting_rows(
    values: Mapping[str, object],
    config: type | None,
    comments: Mapping[str, str],
    group: str,
    prefix: str = "",
) -> Iterator[SettingRow]:
    """Yield the settings of a group, and those inside them.

    Args:
        values: By name.
        config: The dataclass of the settings, if it is known.
        comments: What the file says of them, by key without the group.
        group: Its name.
        prefix: Of the keys in it.
    """
    nested, takes = (nested_configs(config), takes_of(config)) if config else ({}, {})
    for name, value in values.items():
        inner, key = nested.get(name), f"{prefix}{name}"
        is_heading = inner is not None and isinstance(value, Mapping)
        yield SettingRow(
            key=f"{group}.{key}",
            value={} if is_heading else value,
            comment=comments.get(key, ""),
            takes=takes.get(name, ""),
            is_heading=is_heading,
        )
        if is_heading and isinstance(value, Mapping):
            yield from setting_rows(value, inner, comments, group, f"{key}.")


def settings_of(entry: PluginEntry) -> Iterator[SettingRow]:
    """Yield the settings of a callback, in their order."""
    assert entry.factory is not None, "an entry of a kind has a factory"
    config = entry.factory.config
    takes, meanings = takes_of(config), _meanings(config)
    for field in fields(config):
        default = ... if field.default is MISSING else field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        name = field.name
        comment = meanings.get(name, "")
        yield SettingRow(key=name, value=default, comment=comment, takes=takes.get(name, ""))


def _meanings(config: type) -> dict[str, str]:
    """Return what the `Args:` of a docstring say, by name."""
    _, _, told = inspect.cleandoc(config.__doc__ or "").partition("\nArgs:\n")
    found: dict[str, str] = {}
    name = ""
    for line in told.splitlines():
        if start := _ARGUMENT.fullmatch(line):
            name = start["name"]
            found[name] = start["meaning"]
        elif line.startswith(" " * 8) and name:
            found[name] += f" {line.strip()}"
        else:
            name = ""
    return found
