"""How often to save: the interval that `tierd advise` computes, the loss from a backlog of uploads, and the costs
measured from a run's history.

Part of `core`: pure, and imports only `core`.
"""
