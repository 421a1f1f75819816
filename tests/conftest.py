"""What holds for every test: no example of Hypothesis fails for taking long, since machines are shared."""

from hypothesis import settings

settings.register_profile("tierd", deadline=None)
settings.load_profile("tierd")
