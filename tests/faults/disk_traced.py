def trial(rng, home):
    return "traced 0"
