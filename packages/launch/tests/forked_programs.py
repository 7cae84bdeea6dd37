"""Python programs in copies of one process that has imported Hydra and the app, but no PyTorch.

As `python -c PROGRAM` runs them, in a quarter of its time: most of that goes into imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

#: What the copied process runs: for each line that it reads, a copy; it answers with its exit code.
_SERVER = """
import json, os, sys, traceback, types
import sbp_launch.app, sbp_launch.check, sbp_launch.plan
assert "torch" not in sys.modules, "what a program imports could not be told"

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
    """Runs programs, each in a copy of a process that is started here and ended by `close`."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, program: str, arguments: Sequence[str], folder: Path, environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in a folder, with that environment and none of the server's."""
        assert self._server.stdin is not None and self._server.stdout is not None
        with tempfile.TemporaryDirectory() as name:
            out, err = (Path(name, stream) for stream in ("out", "err"))
            out.touch()
            err.touch()
            request = {
                "program": program,
                "arguments": list(arguments),
                "folder": str(folder),
                "environment": environment,
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
