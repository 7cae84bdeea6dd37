"""Random programs of one device, each compared with plain PyTorch: `python -m random_programs`.

`blocks`, `losses` (what programs are made of), `helpers` (functions and modules that blocks call),
`program` (a program as a value, drawn from a seed, and its source), `trial` (one run, compared),
`oracle` (whether a refusal is right), `shrink` (the smallest program with a fault), `table` (what
came of all), `__main__` (the command).
"""
