"""Installs the folders at the top of the repository under one name, ``itercast``."""

from setuptools import find_packages, setup

FOLDERS = ("microbench", "learners", "compose", "eval")

inside = [f"itercast.{name}" for name in find_packages(include=[f"{f}*" for f in FOLDERS])]

setup(
    package_dir={f"itercast.{folder}": folder for folder in FOLDERS},
    packages=[*find_packages(include=["itercast", "itercast.*"]), *inside],
)
