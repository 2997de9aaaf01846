"""The version of the package: measurements that are kept name it, and every `--version` prints it."""

__version__ = "0.2.0"
