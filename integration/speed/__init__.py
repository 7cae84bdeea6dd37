"""The page `docs/reference/speed.md`: every measured figure of speed, from `figures.json`.

`python -m speed document` writes it; with `--check` it sees that the page is up to date. A figure
that is measured again is changed in `figures.json`, with its machine, versions, command and date.
"""
