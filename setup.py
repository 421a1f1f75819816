"""Adds to pyproject.toml the extension that needs a compiler; without one, NumPy does the same work."""

import os

from setuptools import Extension, setup

# A release is one wheel for every machine, so far: `tools.dist` sets this.
PURE = "TIERD_PURE" in os.environ

LOOPS = Extension(
    "tierd.codec._plane_loops",
    ["tierd/codec/_plane_loops.c"],
    depends=["tierd/codec/_delta_loops.h"],
    extra_compile_args=["-O3", "-g0"],
    py_limited_api=True,
    optional=True,
)
setup(ext_modules=[] if PURE else [LOOPS])
