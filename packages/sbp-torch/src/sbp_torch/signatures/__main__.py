"""The command `python -m sbp_torch.signatures`: print how an operator call may be sharded, and why.

    python -m sbp_torch.signatures aten.mm.default 4096x1024 1024x4096
    python -m sbp_torch.signatures aten._softmax.default 8x16x512 -1 False --verify

The command only prints.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

from sbp_core.errors import (
    SbpError,
    SbpLookupError,
    SbpValueError,
    SignatureError,
    unknown_name,
)
from sbp_core.graph import ITEMSIZE, TensorType
from sbp_core.output import standard_output
from sbp_core.plugins import discover as plugins
from sbp_core.sbp import NdSbp
from sbp_core.signatures import (
    Explanation,
    OpCall,
    RuleRegistry,
    UnknownOperator,
    enumerate_signatures,
    explain_call,
    installed_rules,
)

_EPILOG = """
arguments of the operator, in its order, or as name=value:
  4096x1024          a float32 tensor of that shape; 4096x1024:int64 of another dtype
  ():float32         a tensor without dims
  [4x4,4x4]          a list of tensors
  -1, 0.5, [0,1], True, None, torch.float64, sum    anything else, as in Python

examples:
  python -m sbp_torch.signatures aten.mm.default 4096x1024 1024x4096 --verify
  python -m sbp_torch.signatures aten.sum.dim_IntList 4x6 [-1] keepdim=True --axis-size 4
  python -m sbp_torch.signatures aten.view.default 6x4 [24] --mesh 2x3
  python -m sbp_torch.signatures mylib.myop.default 4x6 --import mylib.operators --discover
  python -m sbp_torch.signatures --list softmax

Exit status: 0; 1 if --verify refutes a signature; 2 for bad input.
"""

#: A number that looks like an option.
_NEGATIVE = re.compile(r"-(\d|\.|inf\b|nan\b)")


class _Parser(argparse.ArgumentParser):
    """A parser that reports bad options with errors of this package."""

    def error(self, message: str) -> NoReturn:
        raise SbpValueError(message, todo="--help lists the options")


@standard_output("python -m sbp_torch.signatures")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command line without the program; `sys.argv[1:]` if omitted.

    Returns:
        Exit code: 0; 1 if `--verify` refutes a signature; 2 for bad input.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = _run(_options(words))
    except SbpError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return code


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m sbp_torch.signatures",
        description="How an operator call may be split over a mesh axis, and why.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("op", nargs="?", help="operator and overload, such as aten.mm.default")
    parser.add_argument("arguments", nargs="*", help="its arguments, see below")
    parser.add_argument(
        "--axis-size", type=int, default=2, metavar="N", help="ranks along the axis (default 2)"
    )
    parser.add_argument(
        "--mesh", metavar="SHAPE", help="list the n-D signatures of a mesh, such as 2x4, instead"
    )
    parser.add_argument(
        "--verify", action="store_true", help="run each signature, on random data, also uneven"
    )
    parser.add_argument(
        "--discover",
        action="store_true",
        help="find signatures by execution, and compare; the only way for an operator without rule",
    )
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        dest="modules",
        metavar="MODULE",
        help="import a module first, such as one that registers your operator",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON value, no tables")
    parser.add_argument(
        "--list",
        action="store_true",
        help="list the operators that have rules, or those with OP in their names",
    )
    # argparse recognises -1 as a number, but not -1e-5: a blank in front prevents this.
    spaced = [f" {word}" if _NEGATIVE.match(word) else word for word in words]
    options, unknown = parser.parse_known_intermixed_args(spaced)
    if unknown:
        known = re.findall(r"--[a-z-]+", parser.format_usage())
        raise unknown_name("option", unknown[0], known)
    if options.axis_size < 1:
        raise SbpValueError(
            f"--axis-size {options.axis_size} is no number of ranks", accepted="at least 1"
        )
    if options.axis_size < 2 and options.discover:
        raise SbpValueError(
            "--discover on one rank finds nothing", accepted="--axis-size 2 or more"
        )
    if options.mesh and (options.verify or options.discover):
        raise SbpValueError(
            "--mesh lists signatures and runs none",
            accepted="--mesh, or --verify and --discover",
            todo="leave --mesh out: --verify tries meshes of two axes as well",
        )
    if not options.op and not options.list:
        raise SbpValueError(
            "no operator is given",
            accepted="an operator and its arguments, such as aten.mm.default 4x6 6x8; or --list",
            todo="--help shows how arguments are written",
        )
    return options


def _run(options: argparse.Namespace) -> int:
    if options.list:
        return _print_operators(options)
    for module in options.modules:
        _import(module)
    from sbp_torch.signatures.torch_call import abstract_call  # imports torch, for shapes and tags

    args, kwargs = _arguments(options.op, options.arguments)
    call = abstract_call(options.op, args, kwargs)
    rules = (
        RuleRegistry(plugins=plugins, unknown=UnknownOperator.DISCOVER)
        if options.discover
        else installed_rules()
    )
    _check_has_rule(call, rules)
    if options.mesh:
        found = enumerate_signatures(call, _mesh_shape(options.mesh), rules=rules)
        if options.json:
            _print_json([{"inputs": _texts(s.inputs), "outputs": _texts(s.outputs)} for s in found])
        else:
            sys.stdout.writelines(f"{signature}\n" for signature in found)
        return 0
    explanation = explain_call(call, options.axis_size, rules=rules)
    shown = _as_json(explanation)
    if not options.json:
        sys.stdout.write(f"{explanation}\n")
        sys.stdout.flush()
    code = _execute(options, args, kwargs, explanation, shown, rules)
    if options.json:
        _print_json(shown)
    return code


def _check_has_rule(call: OpCall, rules: RuleRegistry) -> None:
    """Check that a call has a rule or may be split pointwise.

    Raises:
        SignatureError: it may not be split; the message names ways to find its signatures.
    """
    try:
        rules.rule(call)
    except SignatureError as error:
        if call.op in _names_with_rules():
            raise
        raise error.replaced(
            SignatureError,
            todo=f"add --discover, which runs it on pieces to find out; or {error.todo}",
        ) from error


def _names_with_rules() -> list[str]:
    single = [name for name in plugins().names("signature") if "." in name]
    return sorted({*installed_rules().ops, *single})


def _print_operators(options: argparse.Namespace) -> int:
    wanted = options.op or ""
    names = _names_with_rules()
    listed = [op for op in names if wanted in op]
    if not listed:
        near = get_close_matches(wanted, {name.split(".")[1] for name in names}, n=3, cutoff=0.5)
        raise SbpLookupError(
            f"no operator with a rule has {wanted!r} in its name",
            accepted=", ".join(near),
            todo="name the operator and its arguments instead: pointwise operators need no rule",
        )
    if options.json:
        _print_json(listed)
    else:
        sys.stdout.write("".join(f"{op}\n" for op in listed))
    return 0


def _import(module: str) -> None:
    try:
        import_module(module)
    except ImportError as error:
        raise SbpLookupError(
            f"cannot import {module!r}: {error}",
            where="--import",
            accepted="a module of this environment, or of the current folder",
        ) from error


def _execute(
    options: argparse.Namespace,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    explanation: Explanation,
    shown: dict[str, Any],
    rules: RuleRegistry,
) -> int:
    """Verify and discover on random tensors; print the results, or add them to `shown`."""
    if not options.verify and not options.discover:
        return 0
    from sbp_torch.signatures.discovery import discover
    from sbp_torch.signatures.torch_call import random_arguments
    from sbp_torch.signatures.verification import verify

    tensors, named = random_arguments(args, kwargs)
    code = 0
    if options.verify:
        sizes = tuple(dict.fromkeys((2, 3, options.axis_size)))
        try:
            report = verify(options.op, *tensors, axis_sizes=sizes, rules=rules, **named)
        except SbpError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise SbpValueError(
                f"{options.op} cannot be run on made-up data: {str(error).strip()}",
                where="--verify",
                accepted="arguments that work with normal numbers, and integers 0 and 1",
                todo="call sbp_torch.signatures.verification in Python, with tensors of yours",
            ) from error
        code = 0 if report.ok else 1
        shown["verified"] = {"run": len(report.claimed), "wrong": list(map(str, report.wrong))}
        if not options.json:
            sizes_text = ", ".join(map(str, sizes))
            sys.stdout.write(f"\nverified on axes of size {sizes_text}, and pairs:\n{report}\n")
    if options.discover:
        found = discover(options.op, *tensors, axis_size=options.axis_size, **named)
        claimed = {(part.inputs, part.outputs) for part in explanation.legal}
        missed = [str(s) for s in found.signatures if (s.inputs, s.outputs) not in claimed]
        shown["discovered"] = {**found.to_json(), "not_claimed": missed}
        if not options.json:
            sys.stdout.write(f"\ndiscovered on an axis of size {options.axis_size}: {found}\n")
            text = "".join(f"  {entry}\n" for entry in missed)
            sys.stdout.write(f"not in the table above:\n{text}" * bool(missed))
    return code


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _texts(sbps: Iterable[NdSbp]) -> list[str]:
    return list(map(str, sbps))


def _as_json(explanation: Explanation) -> dict[str, Any]:
    def row(entry: Any, key: str) -> dict[str, Any]:
        inputs, outputs, why = entry
        return {
            "inputs": [str(NdSbp(sbp)) for sbp in inputs],
            "outputs": [str(NdSbp(sbp)) for sbp in outputs],
            key: why,
        }

    return {
        "op": explanation.call.op,
        "notation": str(explanation.notation),
        "axis_size": explanation.axis_size,
        "work_flop": explanation.work_flop,
        "legal": [row(entry, "because") for entry in explanation.rows()],
        "refused": [row(entry, "why_not") for entry in explanation.refused],
    }


def _arguments(op: str, words: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Return (args, kwargs) of an operator read from a command line.

    Raises:
        SbpLookupError: PyTorch has no such operator, or it has no argument of that name.
        SbpValueError: a word is no argument of its type.
    """
    from sbp_torch._torch_compat import argument_types

    kinds = argument_types(_operator(op))
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if equals and name.isidentifier():
            if name not in kinds:
                raise unknown_name("argument", name, tuple(kinds), where=f"operator {op}")
            kwargs[name] = _argument(op, name, text, kinds[name])
            continue
        if len(args) == len(kinds):
            raise SbpValueError(
                f"{op} takes {len(kinds)} arguments, and {word!r} is one more",
                accepted=", ".join(f"{name}: {kind}" for name, kind in kinds.items()),
            )
        name = list(kinds)[len(args)]
        args.append(_argument(op, name, word, kinds[name]))
    return args, kwargs


def _argument(op: str, name: str, text: str, kind: str) -> Any:
    """Read one argument of a schema type such as `Tensor`, `List[Tensor]` or `int`."""
    text = text.strip()
    if text in ("None", "none"):
        return None
    if "Tensor" in kind and "List" in kind:
        inner = text.strip().removeprefix("[").removesuffix("]")
        return [_argument(op, name, part.strip(), "Tensor") for part in inner.split(",") if part]
    if "Tensor" in kind:
        shape, _, dtype = text.partition(":")
        if (dtype or "float32") not in ITEMSIZE:
            raise unknown_name("dtype", dtype, tuple(ITEMSIZE), where=f"argument {name} of {op}")
        return TensorType(_shape(shape, f"argument {name} of {op}"), dtype or "float32")
    if text.startswith("torch.") or text in ITEMSIZE:
        return _symbol(op, name, text.removeprefix("torch."))
    if text.lstrip("-") in ("inf", "nan"):
        return float(text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if kind.removeprefix("Optional[").startswith("str"):
            return text
        raise SbpValueError(
            f"{text!r} is no value for {name!r}",
            where=f"argument {name} of {op}",
            accepted=f"a value of type {kind}",
            todo="write it as in Python; in a shell, quote lists and text",
        ) from None


def _symbol(op: str, name: str, text: str) -> Any:
    """Read `float16`, `strided` or `channels_last`."""
    import torch

    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype | torch.layout | torch.memory_format):
        known = (*ITEMSIZE, "strided", "channels_last", "contiguous_format", "preserve_format")
        raise unknown_name("dtype or layout", text, known, where=f"argument {name} of {op}")
    return found


def _operator(op: str) -> Any:
    """Return PyTorch's operator of a name.

    Raises:
        SbpLookupError: there is no such operator; the message suggests one.
    """
    import torch

    from sbp_torch.signatures.torch_call import overload

    try:
        return overload(op)
    except SbpLookupError as error:
        parts = [part for part in op.split(".") if part not in _PLAIN]
        packets = [(parts[0], parts[1])] if len(parts) > 1 else []
        packets += [("aten", part) for part in parts]
        near = [name for packet in packets for name in _overloads(*packet)]
        if not near and parts:
            words = {*dir(torch), *dir(torch.Tensor), *dir(torch.nn.functional)}
            words |= {name.split(".")[1] for name in installed_rules().ops}
            close = get_close_matches(max(parts, key=len), words, n=5, cutoff=0.6)
            near = [name for word in close for name in _overloads("aten", word)[:1]]
        todo = f"did you mean {' or '.join(map(repr, near[:3]))}?" if near else ""
        if op.count(".") == 2 and not op.startswith(("aten.", "torch.")):
            todo = "import the module that registers it: --import MODULE"
        raise error.replaced(SbpLookupError, todo=todo) from None


#: Parts of a name that do not identify an operator.
_PLAIN = frozenset({"aten", "torch", "default"})


def _overloads(namespace: str, name: str) -> list[str]:
    """Return the overloads of an operator that make new tensors; none for an unknown operator."""
    import torch

    packet = getattr(getattr(torch.ops, namespace, None), name, None) if namespace else None
    found: list[str] = getattr(packet, "overloads", list)()
    return [f"{namespace}.{name}.{entry}" for entry in found if "out" not in entry]


def _mesh_shape(text: str) -> tuple[int, ...]:
    """Read `2x4`."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise SbpValueError(
            f"{text!r} is no shape of a mesh", where="--mesh", accepted="ranks an axis, such as 2x4"
        )
    return tuple(map(int, text.split("x")))


def _shape(text: str, where: str) -> tuple[int, ...]:
    """Read `4096x1024`; `()` is the shape without dims."""
    if not re.fullmatch(r"\(\)|\d+(x\d+)*", text):
        raise SbpValueError(
            f"{text!r} is no shape", where=where, accepted="extents such as 4096x1024, or ()"
        )
    return tuple(map(int, text.split("x"))) if text != "()" else ()


if __name__ == "__main__":
    sys.exit(main())
