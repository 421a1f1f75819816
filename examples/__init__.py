"""Programs that use tierd as its users do: through its public names and its command line."""
