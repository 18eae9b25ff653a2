"""The `burnish data` commands: filtering, decontamination, selection."""
