"""Under `torch.distributed.checkpoint`: what `tierd.dcp` gives."""
