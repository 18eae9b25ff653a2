"""The self-contained HTML report of a run, and a PNG of its curves on request; both read the run directory alone."""
