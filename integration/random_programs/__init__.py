"""Random programs of one device, each compared with plain PyTorch: `python -m random_programs`.

`blocks` and `losses` have the parts of programs, `helpers` functions and modules that blocks call.
`program` draws a program from a seed and prints its source, `trial` runs and compares it, `oracle`
judges refusals, `shrink` finds the smallest program with a fault, `table` shows the results, and
`__main__` is the command.
"""
