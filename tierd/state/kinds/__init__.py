"""Handle particular kinds of objects in a state, each in a module of its own.

The kinds are DTensors and their meshes, optimizers, modules, NumPy arrays, generators, random states, data loaders and
datasets of shards. Part of `state`.
"""
