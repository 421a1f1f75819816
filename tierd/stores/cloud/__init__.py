"""Objects in Google Cloud Storage and in Azure Blob Storage, through obstore. Only `stores/open.py` imports it."""
