"""The documents are run: every command, every example, every file that they show.

A page is run from top to bottom in one empty folder, so that a block may use what an earlier block
of the page has made. `blocks` reads a page, `page` runs it, `compare` says what is missing from an
output. `python -m documents [PAGE ...]` does all of it.
"""
