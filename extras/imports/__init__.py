"""The command ``itercast import`` and what importers share: damaged files read, rows checked."""
