"""The declared API of all packages: checks of its use, its pages, and its changes.

    python -m api check                      check that imports between packages use rooms only, and
                                             that public.toml is correct
    python -m api document [--check]         write docs/reference/api/, or check it
    python -m api compare [--against REF]    list the changes since the last release, and the least
                                             version that they require (needs griffe)

A *room* is a module or package that declares `__all__`; other modules are private to their package.
Names of rooms that are in `public.toml` are public; all other names are internal, for our packages.
This package reads source text and imports none of our packages, so they need not be installed.
"""
