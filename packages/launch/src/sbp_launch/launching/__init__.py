"""Who starts the processes of a run, and how they meet.

`choice` says which launcher a run means, `launchers` are the plugins, `launching` starts the ranks
and sees that all end; `rank` is one of them in a process of its own, `logs` the file it writes.
Ranks that torchrun, mpiexec or srun started learn of their run through `meeting`; `slurm_job`
submits one. What a launcher told this process is `sbp_launch.world`.
"""
