"""Pure decisions: no await, no open, no clock and no randomness, so that equal arguments always give equal results.

Every package may import `core`, and `core` imports no other package. `planning` decides what a daemon does next,
`retention` which checkpoints are kept, `timeline` which checkpoints a restore tries, `advice` how often to save, and
`diagnosis` what `tierd doctor` finds.
"""
