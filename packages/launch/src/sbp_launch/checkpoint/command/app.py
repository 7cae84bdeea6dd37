"""Parse the command line of `sbp-checkpoint`, and run inspect, verify, convert, diff or prune.

It imports torch only when tensors are read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from sbp_core.errors import ConfigError, SbpError, nearest, suggestion
from sbp_core.output import standard_output
from sbp_launch.exit_codes import BAD_CONFIG, INTERRUPTED, ended_by

_NAME = "sbp-checkpoint"

_VERBS = {
    "inspect": "show what it contains: names, shapes, dtypes, the step of the run",
    "verify": "read every byte, and check that nothing has changed since it was written",
    "convert": "write it as a file or folder that other programs read, or as a checkpoint",
    "diff": "show how two differ: names, shapes, dtypes, values, settings",
    "prune": "remove older checkpoints of a run, never the newest intact one",
}

_FLAGS = (
    "--json", "--all", "--ema", "--to", "--drop", "--rename", "--max-shard-size", "--overwrite",
    "--keep", "--damaged", "--yes",
)  # fmt: skip

_PATH = (
    "a run folder (then its newest checkpoint), a checkpoint (step-...), a file of safetensors, or "
    "a folder of Hugging Face or of torch.distributed.checkpoint"
)


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports errors as `ConfigError`, like all other code."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, where="the command line", todo=f"see {self.prog} --help")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(prog=_NAME, description="Look at checkpoints, convert and remove them.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    made = {}
    for verb, text in _VERBS.items():
        made[verb] = verbs.add_parser(
            verb, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        made[verb].add_argument("--json", action="store_true", help="print JSON, for programs")
    for verb in ("inspect", "verify"):
        made[verb].add_argument("path", metavar="PATH", help=_PATH)
    made["inspect"].add_argument(
        "--all", action="store_true", help="a line for each tensor, without groups"
    )
    _add_convert(made["convert"])
    one = made["diff"]
    one.add_argument("one", metavar="ONE", help=_PATH)
    one.add_argument("other", metavar="OTHER", help="likewise")
    one.add_argument("--all", action="store_true", help="compare states of the optimizer, too")
    _add_rename(one, "of ONE, to compare")
    one = made["prune"]
    one.add_argument("path", metavar="PATH", help="a run folder, or its checkpoints")
    one.add_argument(
        "--keep", type=int, required=True, metavar="N", help="number of intact checkpoints to keep"
    )
    one.add_argument("--damaged", action="store_true", help="remove damaged ones, too")
    one.add_argument("--yes", action="store_true", help="remove them; by default, only list them")
    return parser


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help=_PATH)
    parser.add_argument("target", metavar="TARGET", help="file or folder to write")
    parser.add_argument(
        "--to",
        choices=("safetensors", "hf", "dcp", "sbp"),
        help="the format: one file of safetensors, Hugging Face's layout, "
        "torch.distributed.checkpoint, or a checkpoint (TARGET is then a run folder, a folder "
        "step-..., or an address); not needed for TARGET.safetensors",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--all", action="store_true", help="also the states of the optimizer")
    group.add_argument("--ema", action="store_true", help="moving averages in place of parameters")
    parser.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave tensors out, such as '*.attn.masked_bias'; may be repeated",
    )
    _add_rename(parser, "to write")
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest file of --to hf (5GB)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what TARGET holds")


def _add_rename(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help=f"replace a prefix of names {what}, such as network.= or =model.; may be repeated",
    )


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = make_parser()
    verbs = [text for text in arguments if not text.startswith("-")]
    if verbs and verbs[0] not in _VERBS:
        raise ConfigError(
            f"there is no {_NAME} {verbs[0]}",
            where="the command line",
            accepted=", ".join(_VERBS),
            todo=suggestion(verbs[0], _VERBS, f"see {_NAME} --help"),
        )
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        near = nearest(unknown[0], _FLAGS)
        raise ConfigError(
            f"there is no option {unknown[0]!r}",
            where="the command line",
            todo=f"did you mean {near}?" if near else f"see {_NAME} {options.verb} --help",
        )
    home = f"sbp_launch.checkpoint.command.{'verify' if options.verb == 'prune' else options.verb}"
    command: Callable[[argparse.Namespace], int] = getattr(import_module(home), options.verb)
    return command(options)


@standard_output(_NAME)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run `sbp-checkpoint`.

    Returns:
        Exit code: 0; 1 if a checkpoint does not verify, two differ, or something cannot be written;
        2 for unreadable files and wrong arguments; 130 after Ctrl-C.
    """
    try:
        return run(sys.argv[1:] if arguments is None else arguments)
    except SbpError as error:
        return ended_by(error, _NAME)
    except BrokenPipeError:
        raise
    except OSError as error:
        named = f": {error.filename}" if isinstance(error.filename, str) else ""
        sys.stderr.write(f"{_NAME}: {error.strerror or error}{named}\n")
        return BAD_CONFIG
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{_NAME}: interrupted\n")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
