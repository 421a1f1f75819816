"""Handle particular kinds of objects in a state, each in a module of its own.

The kinds are DTensors and their meshes, optimizers, modules, NumPy arrays, generators, random states and data loaders.
Part of `state`.
"""
