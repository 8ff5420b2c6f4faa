"""k3deploy: try, prove and judge candidate upgrades of a model served over several machines."""

__version__ = "0.1.0"
