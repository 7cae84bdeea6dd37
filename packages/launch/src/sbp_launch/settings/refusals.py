"""Turn Hydra's refusals of command lines into errors with key, file and nearest valid name."""

from __future__ import annotations

import itertools
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Collection, Sequence

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from sbp_core.errors import ConfigError, nearest
from sbp_launch.settings.catalog import Catalog
from sbp_launch.settings.config import GROUPS, ComposedConfig, key_of
from sbp_launch.settings.option_names import no_option

#: Beginnings of lines in Hydra's messages that only repeat the override, or have a link.
_NO_NEWS = ("Error parsing override", "See http")

#: Beginnings of messages that only describe the grammar of Hydra.
_OF_THE_GRAMMAR = ("Lexer", "extraneous input", "mismatched input", "no viable alternative")

#: SBP values outside quotes, one or one for each axis, which Hydra reads as function calls.
_SBP_CALL = re.compile(
    r"""(?<![\w"'])(?:(?:[BP]|free)\s*,\s*)*[SP]\([^()]*\)"""
    r"""(?:\s*,\s*(?:[SP]\([^()]*\)|(?:[BP]|free)(?![\w"']|\s*:)))*(?!["'])"""
)

#: A key that ends in the name of a tensor: `planner.pins.use:batch=B`, `planner.pins[use:batch]=B`.
_NAME_IN_KEY = re.compile(r"""(\+*[\w.]*\bpins)[.\[]["']?([^=]*?)["']?\]?=(.*)""")


def unreadable(error: OverrideParseException) -> ConfigError:
    """Return the error for an override that Hydra's grammar does not accept."""
    override = error.override or ""
    key, equals, value = override.partition("=")
    if not equals and key[:1] != "~":
        return ConfigError(
            f"{override!r} sets nothing",
            where="the command line",
            accepted="key=value or group=option, without spaces around the equals sign",
            todo=f"choose an option: {key}=OPTION" if key in GROUPS else "see --help",
        )
    told = [line for line in error.message.splitlines() if not line.startswith(_NO_NEWS)]
    todo = "; ".join(told)
    if pin := _NAME_IN_KEY.fullmatch(override):
        name, sbp = pin[2].replace("\\", ""), pin[3] if pin[3][:1] in "\"'{" else f'"{pin[3]}"'
        meant = shlex.quote(f'{pin[1]}={{"{name}": {sbp}}}')
        todo = f"write names of tensors in braces: {meant}"
    elif _SBP_CALL.search(override):
        meant = shlex.quote(_SBP_CALL.sub(r'"\g<0>"', override))
        todo = f"quote values with brackets, and all of it for the shell: {meant}"
    elif value[:1] == "(" and value[-1:] == ")":
        todo = f"write a list in square brackets: '{key}=[{value[1:-1]}]'"
    elif value[:1] == "~":
        todo = "the shell does not replace ~ here: " + (
            f"{key}=$HOME{value[1:]}" if value[1:2] in ("", "/") else "write the whole path"
        )
    elif value[:1] == "{" and told and told[0].startswith(_OF_THE_GRAMMAR):
        todo = f"""put names and values into double quotes: '{key}={{"NAME": "VALUE"}}'"""
    elif told and told[0].startswith(_OF_THE_GRAMMAR):
        todo = f"""put two pairs of quotes around spaces and signs: '{key}="{value}"'"""
    return ConfigError(
        f"the override {override!r} cannot be read",
        where="the command line",
        accepted='key=value, group=option, key=[1,2], key={name: "S(0)"}',
        todo=todo,
    )


def unknown_flag(flag: str, parser: ArgumentParser) -> ConfigError:
    """Return the error for an unknown flag, with a similar flag or setting if there is one."""
    flags = [name for name in parser._option_string_actions if name.startswith("--")]
    near = nearest(flag, flags)
    todo = f"did you mean {near}?" if near else "see --help"
    if "=" in flag:
        todo = f"settings have no dashes: {flag.lstrip('-')}"
    return ConfigError(
        f"no flag is called {flag}", where="the command line", accepted=", ".join(flags), todo=todo
    )


def option_of(override: str) -> str:
    """Return the group and option of an override: `planner/manual/zero`.

    >>> option_of("planner=manual/zero") == option_of("planner/manual=zero")
    True
    """
    return override.lstrip("+").replace("=", "/", 1)


def missing_option(
    config: str, overrides: Sequence[str], file: str, catalog: Catalog
) -> ConfigError:
    """Return the error for an unknown option of a group, with the package that may provide it."""
    group, _, option = config.partition("/")
    said = [text for text in overrides if option_of(text) == config]
    return no_option(
        group,
        option,
        catalog.options(group),
        catalog.registry,
        asked=said[0] if said else f"{group}={option}",
        where=f"the command line: {said[0]}" if said else file,
        misplaced=catalog.misplaced_text(config),
    )


def force_override(text: str, groups: Collection[str], error: Exception) -> str:
    """Return an override in a form that Hydra accepts, whether or not a file has its key."""
    key = key_of(text)
    if key.partition("/")[0] in groups or re.match("hydra[./]", key):
        return text
    if text.startswith("~"):
        return f"++{key}=null" if "=" not in text and f"'{key}'" in str(error) else text
    return f"++{text.lstrip('+')}"


def not_in_the_file(error: Exception, composed: ComposedConfig) -> ConfigError:
    """Return the error for a known setting that is not in the file, so Hydra requires a `+`."""
    for text in composed.overrides:
        key = key_of(text)
        if f"'{key}'" in str(error) and text[0] not in "+~":
            group = key.partition(".")[0]
            return ConfigError(
                f"{key} is not in the file, though {group} takes it",
                where=[composed.files.get(group, ""), f"the command line: {text}"],
                todo=f"add it: +{text}",
            )
    return as_hydra_says(error)


def faulty_file(error: BaseException | None) -> str:
    """Return the file that could not be read as YAML, from the chain of an error, or `""`."""
    while error is not None:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        if mark is not None and mark.name:
            return str(mark.name)
        error = error.__cause__ or error.__context__
    return ""


def unresolved_error(error: OmegaConfBaseException, key: str, where: str) -> ConfigError:
    """Return the error for a setting that has no value.

    Args:
        error: The error of OmegaConf.
        key: The setting, if OmegaConf does not name it.
        where: The file that sets it.
    """
    what = str(error).partition("\n")[0]
    todo = ""
    if isinstance(error, InterpolationResolutionError):
        todo = "${...} stands for another setting: write a name that has these signs as \\${...}"
    return ConfigError(f"{error.full_key or key}: {what}", where=where, todo=todo)


def as_hydra_says(error: Exception) -> ConfigError:
    """Return Hydra's message as an error, without the search path at its end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if several := re.match(r"Ambiguous value for argument '([^=']+)=([^']*)'", str(error)):
        key, values = several.groups()
        return ConfigError(
            f"{key} is set to several values: {values}",
            where=f"the command line: {key}={values}",
            todo=f"as a list: '{key}=[{values}]'; one job for each: add --multirun",
        )
    cause = error.__cause__
    if cause is not None and not isinstance(cause, HydraException):
        lines.append(str(cause).partition("\n")[0])
    kept = list(itertools.takewhile(lambda line: "earch path:" not in line, lines))
    what = kept[0].rstrip(".") if kept else type(error).__name__
    if not isinstance(error, HydraException | UserWarning):
        what = f"the config cannot be composed: {what}"
    return ConfigError(what, where="the command line", todo="; ".join(kept[1:]))
