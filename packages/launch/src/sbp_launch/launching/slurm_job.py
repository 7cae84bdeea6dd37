"""The program of the launcher `slurm`: submit a run to Slurm, and wait for it.

It is started as `python -m sbp_launch.launching.slurm_job FOLDER SETTINGS COMMAND`.

submitit writes the batch script and keeps its files in `FOLDER/logs/slurm`. The output of rank 0 is
forwarded. A first signal is forwarded to the ranks, which stop after a step; a second one cancels
the job. Slurm sends SIGUSR1 before the time limit, and the ranks stop after a step then, too.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from sbp_core.boxing import thread_share
from sbp_core.output import standard_output
from sbp_core.serialize import open_file
from sbp_launch.run.folder import LOGS
from sbp_launch.run.status import status_signals
from sbp_launch.world import FORGET_LAUNCHER, job_port

#: Seconds between two polls of the job.
_LOOK_S = 0.5

#: The signals that are forwarded.
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def _submitit() -> Any:
    """Return the module submitit, which an extra of this package installs."""
    return importlib.import_module("submitit")


def run_task(command: Sequence[str]) -> int:
    """Run one rank in a task of the job; return its exit code."""
    job = _submitit().JobEnvironment()
    first_host = job.hostnames[0] if job.num_nodes > 1 else "127.0.0.1"
    variables = {
        **FORGET_LAUNCHER,
        "RANK": str(job.global_rank),
        "WORLD_SIZE": str(job.num_tasks),
        "LOCAL_RANK": str(job.local_rank),
        "LOCAL_WORLD_SIZE": str(job.num_tasks // job.num_nodes),
        "MASTER_ADDR": first_host,
        "MASTER_PORT": job_port(job.job_id),
    }
    share = thread_share(job.num_tasks // job.num_nodes)
    with subprocess.Popen(command, env={**share, **os.environ, **variables}) as process:

        def pass_on(number: int, frame: FrameType | None) -> None:
            process.send_signal(number)

        for number in (*_PASSED_ON, signal.SIGUSR2):
            signal.signal(number, pass_on)
        return process.wait()


class SlurmJob:
    """A submitted job with the ranks of a run.

    Args:
        folder: The run folder.
        settings: The settings of `SlurmConfig`, and `num_ranks`.
        command: The command of a rank.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], command: Sequence[str]) -> None:
        self._is_local = settings["cluster"] == "local"
        executor = _submitit().AutoExecutor(folder / LOGS / "slurm", cluster=settings["cluster"])
        per_node = settings["num_ranks"] // settings["nodes"]
        wanted = {
            "name": "sbp-train",
            "nodes": settings["nodes"],
            "tasks_per_node": per_node,
            "cpus_per_task": settings["cpus_per_rank"],
            "timeout_min": settings["timeout_min"],
            "stderr_to_stdout": True,
        }
        if settings["gpus_per_rank"]:
            wanted["gpus_per_node"] = settings["gpus_per_rank"] * per_node
        if settings["partition"]:
            wanted["slurm_partition"] = settings["partition"]
        executor.update_parameters(**wanted, **settings["parameters"])
        self._job = executor.submit(run_task, tuple(command))
        self._read = 0
        self._stops = 0

    def stop(self, number: int, frame: FrameType | None = None) -> None:
        """Ask the ranks to stop; the second time, cancel the job."""
        self._stops += 1
        if self._stops > 1:
            self._job.cancel(check=False)
        elif self._is_local:
            os.kill(int(self._job.job_id), signal.SIGTERM)
        else:
            command = ["scancel", "--signal=TERM", str(self._job.job_id)]
            subprocess.run(command, check=False)

    def wait(self) -> int:
        """Forward the output of rank 0 until all have ended; return the first nonzero exit code."""
        sys.stdout.write(f"job {self._job.job_id} is submitted\n")
        sys.stdout.flush()
        while not self._job.done():
            self._pass_on()
            time.sleep(_LOOK_S)
        self._pass_on()
        failed = 0
        for task in range(self._job.num_tasks):
            try:
                code = self._job.task(task).result()
                how = f"exit code {code}"
            except Exception as error:
                code, how = 1, str(error).strip().splitlines()[-1]
            if code:
                sys.stdout.write(f"task {task} of the job failed: {how}\n")
            failed = failed or code
        return failed if failed >= 0 else 128 - failed

    def _pass_on(self) -> None:
        path = Path(self._job.task(0).paths.stdout)
        if not path.exists():
            return
        with open_file(path) as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode("utf-8", "replace").splitlines():
            if not line.startswith("submitit "):  # submitit's own messages
                sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


@standard_output("sbp-train", outlives=True)
def main() -> None:
    """Submit the job, wait for it, and exit with its code."""
    folder, settings, *command = sys.argv[1:]
    job = SlurmJob(Path(folder), json.loads(settings), command)
    for number in _PASSED_ON:
        signal.signal(number, job.stop)
    # This process has no status to report; `scancel --signal=USR2 JOB` sends the request to ranks.
    for asking in status_signals():
        signal.signal(asking, signal.SIG_IGN)
    sys.exit(job.wait())


if __name__ == "__main__":
    main()
