"""Real models on real meshes, each compared with plain PyTorch: `python -m models`.

`programs` (what is trained), `layouts` (on which mesh, how), `trial` (one run, compared), `ranks`
(the same over processes), `table` (what came of all), `__main__` (the command).
"""
