"""Run Python programs in forks of one process that has imported their common modules.

For tests with many programs, where imports take most of the time. A program behaves as under
`python -c`, but some modules are imported already.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["ForkedPrograms"]

#: Source of the server: it forks a child for each request line and prints the child's exit code.
_SERVER = """
import atexit, importlib, json, os, sys, traceback, types
for name in sys.argv[1:]:
    importlib.import_module(name)

def become(request):
    for number, path in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        file = os.open(path, os.O_WRONLY if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    for number, name in ((1, "stdout"), (2, "stderr")):
        setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    paths = filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [path for path in paths if path not in sys.path]
    sys.argv = ["-c", *request["arguments"]]
    sys.modules["__main__"] = types.ModuleType("__main__")
    code = 0
    try:
        exec(compile(request["program"], "<string>", "exec"), vars(sys.modules["__main__"]))
    except SystemExit as stop:
        code = stop.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        become(json.loads(line))
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class ForkedPrograms:
    """Runs programs, each in a fork of a process that is started here and ended by `close`.

    Args:
        imports: Modules that the process imports first; they must start no thread.
    """

    def __init__(self, imports: Sequence[str]) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, program: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in a folder; return its exit code and its output.

        Args:
            program: Source text.
            arguments: `sys.argv[1:]`.
            folder: The working folder.
            environment: All variables; modules are found in the folders of its PYTHONPATH first.
        """
        assert self._server.stdin is not None and self._server.stdout is not None
        with tempfile.TemporaryDirectory() as name:
            out, err = (Path(name, stream) for stream in ("out", "err"))
            out.touch()
            err.touch()
            request = {
                "program": program,
                "arguments": list(arguments),
                "folder": str(folder),
                "environment": dict(environment),
                "out": str(out),
                "err": str(err),
            }
            print(json.dumps(request), file=self._server.stdin, flush=True)
            code = int(self._server.stdout.readline())
            return subprocess.CompletedProcess(
                list(arguments), code, out.read_text("utf-8"), err.read_text("utf-8")
            )

    def close(self) -> None:
        """End the process."""
        self._server.communicate()
