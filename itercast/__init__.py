"""The command line and the public API."""


def __getattr__(name: str) -> str:
    """``__version__``, of the installed package: read when asked for, as that is slow."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("itercast")
