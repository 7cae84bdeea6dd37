"""Run the documents: every command, every example, every file that they show.

A page is run from top to bottom in one empty folder, so a block may use results of earlier blocks
of the page. `blocks` reads a page, `page` runs it, `compare` finds lines that an output lacks.
`python -m documents [PAGE ...]` runs pages.
"""
