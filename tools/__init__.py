"""What maintainers run. Nothing of it is in a wheel."""
