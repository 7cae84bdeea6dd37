"""The declared API of all packages: what it is, who keeps to it, its page, and what has changed.

    python -m api check                      imports between packages lead to rooms only, and
                                             public.toml holds
    python -m api document [--check]         write docs/reference/api/, or check it
    python -m api compare [--against REF]    what changed since the last release, and which version
                                             that asks for (needs griffe)

A *room* is a module or package that declares `__all__`; other modules are private to their package.
Of the names of rooms, those in `public.toml` are public; all others are internal, for our packages.
Everything here reads source text: no package is imported, so it runs before they are installed.
"""
