"""Training scripts as they are published, each in plain PyTorch and by `parallelize`.

`plain/NAME.py` is a program of one device, or one for `torchrun` with `DistributedDataParallel`;
`ours/NAME.py` is the same by `parallelize`, and prints the same losses. `README.md` counts the
lines that differ: `python -m scripts document` writes it.
"""
