"""The S3 store: aiobotocore over tierd's own HTTP transport. Part of `stores`."""
