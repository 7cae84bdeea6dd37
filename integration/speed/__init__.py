"""The page `docs/reference/speed.md`: every measured figure of speed, from `figures.json`.

`python -m speed document` writes it; `--check` checks that the page is up to date. To update a
figure, change it in `figures.json`, with its machine, versions, command and date.
"""
