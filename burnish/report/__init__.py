"""The self-contained HTML report and the PNG of a run, from the run directory alone."""
