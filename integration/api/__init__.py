"""The declared API of all packages: what it is, who keeps to it, its page, and what has changed.

    python -m api check                      imports between packages lead to rooms only
    python -m api document [--check]         write docs/reference/api.md, or check it
    python -m api compare [--against REF]    what changed since the last release, and which version
                                             that asks for (needs griffe)

A *room* is a module or package that declares `__all__`; what lies behind it is private. Everything
here reads source text: nothing of the packages is imported, so it runs before they are installed.
"""
