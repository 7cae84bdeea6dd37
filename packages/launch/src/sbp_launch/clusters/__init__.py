"""Cluster profiles: rates of devices and links, declared (`local`), of data sheets, or measured."""
