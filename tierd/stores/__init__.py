"""Where objects rest: the `Store` contract (`base`), its stores (`file`, `s3`, `memory`) and the wrapper `retry`."""
