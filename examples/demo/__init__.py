"""`make demo`: a trainer, a daemon, a SIGKILL, two flipped bits, and a run that ends as if nothing had happened."""
