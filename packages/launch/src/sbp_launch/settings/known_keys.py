"""List the keys of all settings with their meaning, and suggest a key for an unknown one.

A key is searched in all groups by its last name: `steps` may mean `trainer.steps`. The settings of
callbacks are read from their dataclasses, because callbacks have no option files.
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

#: The names of our settings in other trainers.
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

#: Our key for each of these names, in the order of the names.
OTHER_NAMES: Mapping[str, str] = dict(
    sorted((name, ours) for ours, names in _CALLED.items() for name in names.split())
)

#: The smallest similarity between a typing error and the intended key.
_ALIKE = 0.6

#: The same for a last name alone, which is shorter.
_ALIKE_NAMES = 0.75

#: The same for a last name in other trainers, which has priority over a name of ours.
_ALIKE_OTHERS = 0.85

#: The largest number of keys that a hint names.
_MOST_HINTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting that some option has.

    Args:
        key: Its key, such as `planner.memory_bytes`.
        options: The options that have it, such as `planner=osdp`; empty if the chosen one has it.
    """

    key: str
    options: tuple[str, ...] = ()

    @property
    def leaf(self) -> str:
        """The last name of its key."""
        return self.key.rpartition(".")[2]


def known_settings(composed: ComposedConfig, registry: PluginRegistry) -> tuple[Setting, ...]:
    """Return the settings of the groups of a config, beginning with those of chosen options."""
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
    """Yield the keys of a config dataclass, and of the dataclasses in it."""
    assert is_dataclass(config), f"{config!r} is no dataclass"
    for name, nested in nested_configs(config).items():
        yield f"{prefix}.{name}"
        if nested is not None:
            yield from keys_of(nested, f"{prefix}.{name}")


def nested_configs(config: type) -> dict[str, type | None]:
    """Return the field names of a config dataclass, with the dataclass of the value or None."""
    assert is_dataclass(config), f"{config!r} is no dataclass"
    hints = type_hints(config)
    return {field.name: _dataclass_of(hints.get(field.name)) for field in fields(config)}


def takes_of(config: type) -> dict[str, str]:
    """Return a text for each setting of a config dataclass on the values that it accepts."""
    assert is_dataclass(config), f"{config!r} is no dataclass"
    hints = type_hints(config)
    return {field.name: describe_type(hints[field.name]) for field in fields(config)}


def _dataclass_of(hint: object) -> type | None:
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((one for one in parts if isinstance(one, type) and is_dataclass(one)), None)


def ours_of(name: str, names: Iterable[str] = ()) -> str:
    """Return our key for a name in other trainers, or a similar name; `""` if there is none.

    Args:
        name: The name that a user wrote.
        names: Our last names; if one of them is more similar, the result is `""`.

    >>> ours_of("gradient_cliping")
    'trainer.update.clip_norm'
    """
    near = difflib.get_close_matches(name, [*names, *OTHER_NAMES], n=1, cutoff=_ALIKE_OTHERS)
    return OTHER_NAMES.get(near[0], "") if near else ""


def meant(key: str, settings: Iterable[Setting], value: str = "") -> str:
    """Return a hint on the intended key for an unknown key, or `""`.

    The last name decides: the same name in other groups, a name in other trainers, a similar name.

    Args:
        key: The unknown key, such as `steps`, `trainer.lr` or `trianer.steps`.
        settings: All settings.
        value: The value that the user gave.
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


#: The first line of a setting in `Args:` of a docstring: `patience: Evaluations without ...`.
_ARGUMENT = re.compile(r" {4}(?P<name>\w+): (?P<meaning>.*)")


def callbacks_of(registry: PluginRegistry) -> list[PluginEntry]:
    """Return all callbacks, sorted by name."""
    return [one for one in registry.entries if one.kind == "callback" and one.factory is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """One setting in the help: its comment, from a file or docstring, and the values it accepts.

    Args:
        key: The key of the setting; for a callback, the name of the field.
        value: Its value; `...` if it must be given, `{}` for a heading.
        comment: Its description, or `""`.
        takes: A text on the values that it accepts.
        is_heading: Whether it has settings, with rows below.
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
        values: The values by name.
        config: The dataclass of the settings, if known.
        comments: The comments of the file, by key without the group.
        group: The name of the group.
        prefix: The prefix of the keys in it.
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
    """Yield the settings of a callback, in the order of its fields."""
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
    """Return the descriptions in `Args:` of a docstring, by name."""
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
