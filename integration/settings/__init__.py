"""The page `docs/reference/settings.md`, of the packages of this repository.

`python -m settings document` writes it. With `--check` it checks that the page is up to date, and
that every option file describes its settings.
"""
