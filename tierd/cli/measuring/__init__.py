"""Commands that measure, or compute from measurements: how often to save, what a save costs, whether a loop resumes.

Imported by `cli/__init__.py`.
"""
