"""Real models on real meshes, each compared with plain PyTorch: `python -m models`.

`programs` has the models, `layouts` the meshes and shardings. `trial` runs and compares one cell,
`ranks` does the same with processes, `table` shows the results, `__main__` is the command.
"""
