"""A data pipeline whose whole state travels in the checkpoint: shuffle by epoch and rank, buffer, packing, prefetch.

tierd check-resume examples.pipeline.train:train --ranks 2 --steps 30 --kill-at 5,8,20+save
"""
