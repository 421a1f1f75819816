"""What runs inside the training process. Only these modules import torch; none loads asyncio or a store."""
