"""Save: captured state -> arena -> the daemon, or this process's own writer. Part of `client`."""
