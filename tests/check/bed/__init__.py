"""The test bed of `tierd check-resume`: planted mistakes and correct loops, and what the check says of each."""
