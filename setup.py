"""Builds the two C extensions; everything else is in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["aio/_build.py:ffibuilder", "trainer/_build.py:ffibuilder"])
