"""The pure rooms: no await, no open, no clock, no randomness. Everything here can be called twice with one answer."""
