"""Names of tensors in checkpoints: find owners, strip wrapper prefixes, select and rename.

The commands of `sbp-checkpoint` use it, and the code that loads weights. The name of an optimizer
state is the name of its parameter and a key: `weight.exp_avg` belongs to `weight`. Parameters and
buffers never have such names, because only modules have children. A few states belong to no
parameter (`SHARED`).
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from sbp_core.errors import ConfigError, suggestion

#: Key of the moving average of a parameter.
AVERAGE = "ema"

#: States of an update that belong to no parameter.
SHARED = frozenset({"loss_scaler.scale", "loss_scaler.growth_tracker", "ema.count"})

#: Attributes in which wrappers keep the wrapped module: `DataParallel` and its like,
#: `torch.compile`, `checkpoint_wrapper`, `FullyShardedDataParallel`, Lightning Fabric.
_WRAPPERS = frozenset(
    {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}
)


def owner_of(name: str, names: Mapping[str, object] | set[str]) -> str:
    """Return the parameter that an optimizer state belongs to; empty for all other tensors.

    >>> owner_of("layer.weight.exp_avg", {"layer.weight", "layer.weight.exp_avg"})
    'layer.weight'
    """
    owner = name.rpartition(".")[0]
    return owner if owner in names else ""


def common_prefix(names: Iterable[str]) -> str:
    """Return the common prefix of all names, which ends in a dot; empty if there is none.

    >>> common_prefix(["model.layer.weight", "model.layers"])
    'model.'
    """
    paths = [name.split(".")[:-1] for name in names]
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return "".join(f"{parts[0]}." for parts in common)


def model_names(names: Iterable[str]) -> list[str]:
    """Return the names of parameters and buffers; a prefix that all names share is ignored."""
    known = set(names)
    beginning = common_prefix(known)
    shared = SHARED | {beginning + name for name in SHARED}
    return [name for name in names if name not in shared and not owner_of(name, known)]


def without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Map names to the same names without the parts that wrappers of modules add.

    >>> without_wrappers(["h.0._orig_mod.weight", "module.h.1.weight"])
    {'h.0._orig_mod.weight': 'h.0.weight', 'module.h.1.weight': 'h.1.weight'}

    If two names would become equal, no name is changed.

    >>> without_wrappers(["module.weight", "weight"])
    {'module.weight': 'module.weight', 'weight': 'weight'}
    """
    found = {
        name: ".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names
    }
    return found if len({*found.values()}) == len(found) else {name: name for name in found}


def match_names(given: Iterable[str], own: Iterable[str]) -> dict[str, str]:
    """Map the names of a step to those in a checkpoint, which may differ in wrapper prefixes.

    Optimizer states and moving averages follow their parameter.

    >>> match_names(["h._orig_mod.w", "h._orig_mod.w.exp_avg"], ["h.w"])
    {'h.w': 'h._orig_mod.w', 'h.w.exp_avg': 'h._orig_mod.w.exp_avg'}

    Ambiguous names are kept.

    >>> match_names(["module.w", "w", "module.b"], ["_orig_mod.w", "b"])
    {'module.w': 'module.w', 'w': 'w', 'b': 'module.b'}
    """
    known, wanted = [*given], {*own}
    theirs, ours = Counter(map(_strip_wrappers, known)), Counter(map(_strip_wrappers, wanted))
    here = {plain: name for name in wanted if ours[plain := _strip_wrappers(name)] == 1}
    found: dict[str, str] = {}
    # A parameter is found before its states, whose names are longer.
    for name in sorted(known, key=len):
        plain, (owner, _, key) = _strip_wrappers(name), name.rpartition(".")
        if name in wanted or theirs[plain] != 1:
            found[name] = name
        elif owner in found:
            found[name] = f"{found[owner]}.{key}"
        else:
            found[name] = here.get(plain, name)
    renamed = {found[name]: name for name in known}
    return renamed if len(renamed) == len(known) else {name: name for name in known}


def _strip_wrappers(name: str) -> str:
    *path, key = name.split(".")
    return ".".join([*(part for part in path if part not in _WRAPPERS), key])


def use_averages(names: Iterable[str]) -> dict[str, str]:
    """Map parameters and buffers to the names of their moving averages, or to themselves.

    Raises:
        ConfigError: there is no moving average.
    """
    known = set(names)
    found = {}
    for name in model_names(names):
        average = f"{name}.{AVERAGE}"
        found[name] = average if average in known else name
    if not any(name != source for name, source in found.items()):
        raise ConfigError(
            "no parameter has a moving average",
            where="--ema",
            accepted="a checkpoint of a run with trainer.update.ema_decay",
        )
    return found


def drop_matching(names: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """Return the names that match none of the shell patterns.

    Raises:
        ConfigError: a pattern matches no name.
    """
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"no name matches {pattern!r}",
                where="--drop",
                accepted="a name, or a pattern with * and ?",
                todo=suggestion(pattern, names),
            )
    return {
        name: source
        for name, source in names.items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def parse_renames(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Parse `OLD=NEW`: return each prefix of names with its replacement.

    Raises:
        ConfigError: a text has no `=`.
    """
    for text in texts:
        if "=" not in text:
            raise ConfigError(
                f"--rename {text!r} has no new prefix",
                accepted="OLD=NEW, such as network.= (which removes it) or =model. (which adds it)",
            )
    return [(old, new) for old, _, new in (text.partition("=") for text in texts)]


def rename(names: Mapping[str, str], renames: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return names with replaced prefixes; the first rename that fits a name is used.

    >>> rename({"network.wte": "network.wte"}, [("network.", "")])
    {'wte': 'network.wte'}

    An OLD that begins with a dot is replaced anywhere in a name.

    >>> rename({"h.0._orig_mod.weight": ""}, [("._orig_mod.", ".")])
    {'h.0.weight': ''}

    Raises:
        ConfigError: no name has the prefix, or two names become equal.
    """
    found: dict[str, str] = {}
    used = set()
    for name, source in names.items():
        fitting = (
            (old, new)
            for old, new in renames
            if (old in name if old[:1] == "." else name.startswith(old))
        )
        old, new = next(fitting, ("", ""))
        used.add(old)
        other = name.replace(old, new) if old[:1] == "." else new + name.removeprefix(old)
        if other in found or not other:
            raise ConfigError(
                f"{name!r} and {found.get(other, '')!r} would both be called {other!r}",
                where="--rename",
            )
        found[other] = source
    for old, new in renames:
        if old not in used:
            firsts = {f"{name.partition('.')[0]}." for name in names}
            raise ConfigError(
                f"no name begins with {old!r}",
                where=f"--rename {old}={new}",
                accepted=", ".join(sorted(firsts)[:8])
                + (
                    f"; or .{old} for the middle of names"
                    if any(f".{old}" in n for n in names)
                    else ""
                ),
                todo=suggestion(old, firsts),
            )
    return found
