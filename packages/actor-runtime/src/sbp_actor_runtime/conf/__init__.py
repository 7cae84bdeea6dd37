"""Config options of this package, found by Hydra."""
