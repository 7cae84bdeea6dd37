"""The page `docs/reference/settings.md`, of the packages of this repository.

`python -m settings document` writes it; with `--check` it sees that the page is up to date, and
that every option file says what its settings mean.
"""
