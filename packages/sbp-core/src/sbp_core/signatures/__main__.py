"""The command `python -m sbp_core.signatures`: print the signatures of a call, and why.

    python -m sbp_core.signatures aten.mm.default 4096x1024 1024x4096
    python -m sbp_core.signatures aten._softmax.default 8x16x512 -1 False --verify

Prints; decides nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Sequence
from typing import Any

from sbp_core.errors import SbpError, SbpValueError, unknown_name
from sbp_core.graph.ir import ITEMSIZE, TensorType
from sbp_core.sbp import NdSbp
from sbp_core.signatures.axes import enumerate_signatures
from sbp_core.signatures.explain import Explanation, explain_call
from sbp_core.signatures.registry import installed

_USAGE = """
arguments of the operator, in its order, or as name=value:
  4096x1024          a float32 tensor of that shape; 4096x1024:int64 of another dtype
  ():float32         a tensor without dims
  [4x4,4x4]          a list of tensors
  -1, 0.5, [0,1], True, None, torch.float64, sum    anything else, as in Python
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command line without the program; `sys.argv[1:]` if omitted.

    Returns:
        Exit code: 0; 1 if `--verify` refutes a signature; 2 for bad input.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sbp_core.signatures",
        description="How an operator call may be split over a mesh axis, and why.",
        epilog=_USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("op", nargs="?", help="operator and overload, such as aten.mm.default")
    parser.add_argument("arguments", nargs="*", help="its arguments, see below")
    parser.add_argument("--axis-size", type=int, default=2, help="ranks along the axis (default 2)")
    parser.add_argument("--mesh", help="list the n-D signatures of a mesh, such as 2x4")
    parser.add_argument("--verify", action="store_true", help="run each signature, on random data")
    parser.add_argument("--discover", action="store_true", help="find signatures by execution")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--list", action="store_true", help="list the operators that have rules")
    options, unknown = parser.parse_known_args(arguments)
    # What argparse takes for an option may be a negative number.
    options.arguments += [word for word in unknown if not word.startswith("--")]
    try:
        _check(options, [word for word in unknown if word.startswith("--")])
        return _run(options)
    except SbpError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _check(options: argparse.Namespace, unknown: Sequence[str]) -> None:
    if unknown:
        raise unknown_name(
            "option",
            unknown[0],
            ("--axis-size", "--mesh", "--verify", "--discover"),
        )
    if options.axis_size < 1:
        raise SbpValueError(f"--axis-size {options.axis_size}", accepted="at least 1")
    if not options.op and not options.list:
        raise SbpValueError("no operator is given", accepted="aten.mm.default, or --list")


def _run(options: argparse.Namespace) -> int:
    if options.list:
        wanted = options.op or ""
        listed = [op for op in installed().ops if wanted in op]
        sys.stdout.write("".join(f"{op}\n" for op in listed))
        return 0
    from sbp_core.signatures.torch_call import abstract_call  # imports torch, for shapes and tags

    args, kwargs = _arguments(options.op, options.arguments)
    call = abstract_call(options.op, args, kwargs)
    if options.mesh:
        for signature in enumerate_signatures(call, _shape(options.mesh)):
            sys.stdout.write(f"{signature}\n")
        return 0
    explanation = explain_call(call, options.axis_size)
    sys.stdout.write((_as_json(explanation) if options.json else str(explanation)) + "\n")
    return _execute(options, args, kwargs) if options.verify or options.discover else 0


def _execute(options: argparse.Namespace, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Verify and discover on random tensors."""
    from sbp_core.signatures.discover import discover
    from sbp_core.signatures.torch_call import random_arguments
    from sbp_core.signatures.verify import verify

    tensors, named = random_arguments(args, kwargs)
    code = 0
    if options.verify:
        report = verify(options.op, *tensors, **named)
        sys.stdout.write(f"\n{report}\n")
        code = 0 if report.ok else 1
    if options.discover:
        found = discover(options.op, *tensors, axis_size=options.axis_size, **named)
        sys.stdout.write(f"\n{found}\n")
    return code


def _as_json(explanation: Explanation) -> str:
    def row(entry: Any, key: str) -> dict[str, Any]:
        inputs, outputs, why = entry
        return {
            "inputs": [str(NdSbp(sbp)) for sbp in inputs],
            "outputs": [str(NdSbp(sbp)) for sbp in outputs],
            key: why,
        }

    return json.dumps(
        {
            "op": explanation.call.op,
            "notation": str(explanation.notation),
            "axis_size": explanation.axis_size,
            "work_flop": explanation.work_flop,
            "legal": [row(entry, "because") for entry in explanation.rows()],
            "refused": [row(entry, "why_not") for entry in explanation.refused],
        },
        indent=2,
    )


def _arguments(op: str, words: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Return (args, kwargs) of an operator read from a command line.

    Raises:
        SbpLookupError: PyTorch has no such operator, or it has no argument of that name.
        SbpValueError: a word is no argument of its type.
    """
    from sbp_core._torch_compat import argument_types
    from sbp_core.signatures.torch_call import overload

    kinds = argument_types(overload(op))
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
            raise SbpValueError(f"{op} takes {len(kinds)} arguments", accepted=", ".join(kinds))
        name = list(kinds)[len(args)]
        args.append(_argument(op, name, word, kinds[name]))
    return args, kwargs


def _argument(op: str, name: str, text: str, kind: str) -> Any:
    """Read one argument of a schema type such as `Tensor`, `List[Tensor]` or `int`."""
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
    if text.startswith("torch."):
        import torch

        return getattr(torch, text.removeprefix("torch."))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if kind.removeprefix("Optional[").startswith("str"):
            return text
        raise SbpValueError(
            f"{text!r} is no value for {name!r} of {op}", accepted=f"a value of type {kind}"
        ) from None


def _shape(text: str, where: str = "") -> tuple[int, ...]:
    """Read `4096x1024`; `()` is the shape without dims."""
    try:
        return tuple(int(part) for part in text.split("x")) if text != "()" else ()
    except ValueError:
        raise SbpValueError(
            f"{text!r} is no shape", where=where, accepted="extents such as 4096x1024, or ()"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
