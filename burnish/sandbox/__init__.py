"""Runs untrusted programs where they can do no harm: in namespaces, under limits, with their tests in another process."""
