"""The version of perfcast, read by the build."""

__version__ = "0.1.0"
