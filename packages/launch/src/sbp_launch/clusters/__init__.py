"""The cluster profiles that come with sbp-launch: rates declared (`local`) or measured."""
