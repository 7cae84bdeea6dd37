"""Import every module of the package named first on the command line; show the first failure.

Further arguments name modules of extras that are not installed: a module that needs one of them
counts as waiting for it, not as a failure.
"""

import importlib
import pkgutil
import sys


def main() -> None:
    name, extras = sys.argv[1], sys.argv[2:]
    imported, waiting = 0, []
    package = importlib.import_module(name)
    for found in [package.__name__, *_modules(package.__path__, name)]:
        try:
            importlib.import_module(found)
            imported += 1
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] not in extras:
                raise
            waiting.append(found)
    print(f"{imported} modules of {name} import with what is installed")
    if waiting:
        print(f"{len(waiting)} wait for an extra ({', '.join(extras)}): {', '.join(waiting)}")


def _modules(path: object, name: str) -> list[str]:
    def waits(_: str) -> None:
        """Continue after a package that needs an extra; it is reported when it is imported."""

    return [found.name for found in pkgutil.walk_packages(path, f"{name}.", onerror=waits)]


if __name__ == "__main__":
    main()
