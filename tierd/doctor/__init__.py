"""`tierd doctor`: try what a daemon and its trainers will need, on this machine and on each tier.

It observes; `core/diagnosis/` judges. It stands below `cli`, which alone imports it.

Invariant: an examination ends, whatever hangs; it leaves nothing behind; and no finding repeats a secret.
"""
