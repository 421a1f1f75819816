"""Loops that other people wrote after mistakes in real projects, with what is right to say of each in its header."""
