"""The `burnish data` commands: preparing, filtering, selecting and decontaminating data sets."""
